//! What a model's folder says about prompts: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.

use std::path::Path;

use minijinja::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::Unsure;
use super::args::Options;
use super::json::{Json, Map};
use super::template::{Now, Template};

/// Largest file that is read: the tokenizers of the largest vocabularies have 30 MB.
const FILE_MAX: u64 = 256 << 20;

/// The named special tokens, which a template finds under these names.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

fn read(path: &Path) -> Result<Option<Vec<u8>>, Unsure> {
    let failed = |error: std::io::Error| Unsure::of(format!("failed to read {}: {error}", path.display()));
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
        Ok(facts) if facts.len() > FILE_MAX => Err(Unsure::of(format!("{} is too large", path.display()))),
        Ok(_) => std::fs::read(path).map(Some).map_err(failed),
    }
}

fn config(model: &Path) -> Result<Map, Unsure> {
    match read(&model.join("tokenizer_config.json"))? {
        None => Ok(Map::default()),
        Some(bytes) => match Json::read(&bytes)? {
            Json::Map(map) => Ok(map),
            _ => Err(Unsure::of("tokenizer_config.json is no object")),
        },
    }
}

/// The tokenizer, with the added tokens that only its configuration names.
pub fn tokenizer(model: &Path) -> Result<Tokenizer, Unsure> {
    let bytes =
        read(&model.join("tokenizer.json"))?.ok_or_else(|| Unsure::of("the model has no tokenizer.json"))?;
    let mut tokenizer =
        Tokenizer::from_bytes(bytes).map_err(|error| Unsure::of(format!("tokenizer.json: {error}")))?;
    let config = config(model)?;
    let known: Vec<String> =
        tokenizer.get_added_tokens_decoder().into_values().map(|token| token.content).collect();
    let mut missing: Vec<AddedToken> = Vec::new();
    let declared = config.get("added_tokens_decoder").and_then(Json::map);
    for (_, token) in declared.into_iter().flat_map(Map::iter) {
        if let Some(token) = token.map().and_then(added).filter(|token| !known.contains(&token.content)) {
            missing.push(token);
        }
    }
    for name in NAMED {
        if let Some(text) = config.get(name).and_then(content)
            && !known.iter().any(|known| known == text)
            && !missing.iter().any(|token| token.content == text)
        {
            missing.push(AddedToken::from(text, true));
        }
    }
    for token in missing {
        let added = match token.special {
            true => tokenizer.add_special_tokens([token]),
            false => tokenizer.add_tokens([token]),
        };
        added.map_err(|error| Unsure::of(error.to_string()))?;
    }
    Ok(tokenizer)
}

fn added(map: &Map) -> Option<AddedToken> {
    let flag = |name: &str| map.get(name) == Some(&Json::Bool(true));
    let token = AddedToken::from(map.text("content")?, flag("special"));
    let token = token.lstrip(flag("lstrip")).rstrip(flag("rstrip")).single_word(flag("single_word"));
    Some(token.normalized(flag("normalized")))
}

/// A token's text, given bare or as an object.
fn content(token: &Json) -> Option<&str> {
    token.text().or_else(|| token.map()?.text("content"))
}

/// The model's templates: one for all, or another one where tools are given.
#[derive(Debug)]
pub struct Templates {
    plain: Template,
    tools: Option<Template>,
    specials: Vec<(&'static str, Value)>,
}

impl Templates {
    pub fn load(options: &Options, now: &Now) -> Result<Self, Unsure> {
        let config = config(&options.model)?;
        let (plain, tools) = sources(options, &config)?;
        let compile = |source: &str| Template::new(source, Now::clone(now));
        let named = |name: &'static str| Some((name, Value::from(content(config.get(name)?)?)));
        Ok(Self {
            plain: compile(&plain)?,
            tools: tools.as_deref().map(compile).transpose()?,
            specials: NAMED.into_iter().filter_map(named).collect(),
        })
    }

    pub fn for_chat(&self, tools: bool) -> &Template {
        self.tools.as_ref().filter(|_| tools).unwrap_or(&self.plain)
    }

    pub fn specials(&self) -> &[(&'static str, Value)] {
        &self.specials
    }

    pub fn wants_parts(&self) -> bool {
        self.plain.wants_parts
    }

    /// Whether system messages of `/v1/messages` are merged: the engine does so if either template asks for it.
    pub fn system_first(&self) -> bool {
        self.plain.system_first || self.tools.as_ref().is_some_and(|template| template.system_first)
    }
}

/// The text of the template, and of the one for tools where there are two.
fn sources(options: &Options, config: &Map) -> Result<(String, Option<String>), Unsure> {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|_| Unsure::of("the template is no text"));
    if let Some(given) = &options.template {
        // A file, or the template itself, which has braces; so the engine tells them apart.
        return match read(Path::new(given)) {
            Ok(Some(bytes)) => Ok((text(bytes)?, None)),
            _ if given.contains(['{', '}', '\n']) => Ok((given.clone(), None)),
            _ => Err(Unsure::of("the file given as --chat-template cannot be read")),
        };
    }
    if options.model.join("additional_chat_templates").exists() {
        return Err(Unsure::of("the model has additional chat templates"));
    }
    if let Some(bytes) = read(&options.model.join("chat_template.jinja"))? {
        return Ok((text(bytes)?, None));
    }
    match config.get("chat_template") {
        Some(Json::Text(source)) => Ok((source.to_string(), None)),
        Some(Json::List(list)) => {
            let of = |name: &str| {
                let entry =
                    list.iter().filter_map(Json::map).find(|entry| entry.text("name") == Some(name))?;
                entry.text("template").map(str::to_owned)
            };
            let plain = of("default").ok_or_else(|| Unsure::of("the model has no default chat template"))?;
            Ok((plain, of("tool_use")))
        }
        _ => Err(Unsure::of("the model has no chat template")),
    }
}
