//! What the engine's command line says about prompts.

use std::path::{Path, PathBuf};

use super::Unsure;
use super::json::{Json, Map};
use crate::router::chain::Extra;

/// How this engine makes prompts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// Folder of the model.
    pub model: PathBuf,
    /// `--chat-template`: a file, or the template itself.
    pub template: Option<String>,
    /// `--chat-template-content-format`: list of parts or text. None: the engine finds out.
    pub parts: Option<bool>,
    /// `--default-chat-template-kwargs`.
    pub defaults: Map,
    /// `--exclude-tools-when-tool-choice-none`.
    pub exclude_tools: bool,
    /// Adapters by the name under which they are served: name and path go into the hash.
    pub adapters: Vec<(String, String)>,
}

/// Arguments under which the engine makes prompts in ways that are not followed here.
const UNFOLLOWED: [&str; 12] = [
    "--tokenizer",
    "--tokenizer-mode",
    "--tokenizer-revision",
    "--skip-tokenizer-init",
    "--enable-prompt-embeds",
    "--trust-request-chat-template",
    "--io-processor-plugin",
    "--config",
    "--hf-overrides",
    "--hf-config-path",
    "--renderer",
    "--config-format",
];

impl Options {
    /// Of the engine that runs `model` with these further arguments.
    pub fn of(model: &Path, args: &[String]) -> Result<Self, Unsure> {
        let mut options = Self { model: model.to_owned(), ..Self::default() };
        let mut rest = args.iter().map(String::as_str).peekable();
        while let Some(word) = rest.next() {
            // vLLM takes `--a_b` for `--a-b`, and a value after a space or an `=`.
            let (name, joined) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (word, None),
            };
            let name = name.replace('_', "-");
            let value = || joined.map(str::to_owned);
            if UNFOLLOWED.contains(&name.as_str()) {
                return Err(Unsure::of(format!("the engine runs with {name}")));
            }
            match name.as_str() {
                "--chat-template" => options.template = value().or_else(|| rest.next().map(Into::into)),
                "--chat-template-content-format" => {
                    options.parts = match value().or_else(|| rest.next().map(Into::into)).as_deref() {
                        Some("openai") => Some(true),
                        Some("string") => Some(false),
                        _ => None,
                    };
                }
                "--default-chat-template-kwargs" => {
                    let text = value().or_else(|| rest.next().map(Into::into)).unwrap_or_default();
                    let Json::Map(map) = Json::read(text.as_bytes())? else {
                        return Err(Unsure::of(format!("{name} is no object")));
                    };
                    options.defaults = map;
                }
                "--exclude-tools-when-tool-choice-none" => options.exclude_tools = true,
                "--no-exclude-tools-when-tool-choice-none" => options.exclude_tools = false,
                "--lora-modules" => {
                    let first = value();
                    let more = std::iter::from_fn(|| rest.next_if(|word| !word.starts_with("--")));
                    for word in first.into_iter().chain(more.map(Into::into)) {
                        options.adapters.push(adapter(&word)?);
                    }
                }
                _ => {}
            }
        }
        Ok(options)
    }

    /// What else goes into the hashes of a request's blocks.
    pub fn extra(&self, body: &Map) -> Result<Extra, Unsure> {
        let salt = match body.given("cache_salt") {
            None => None,
            Some(Json::Text(salt)) => Some(salt.to_string()),
            Some(_) => return Err(Unsure::of("a cache_salt that is no text")),
        };
        let model = body.text("model").unwrap_or_default();
        Ok(Extra { salt, lora: self.adapters.iter().find(|(name, _)| name == model).cloned() })
    }
}

/// `name=path`, or `{"name": …, "path": …}`.
fn adapter(word: &str) -> Result<(String, String), Unsure> {
    if let Some((name, path)) = word.split_once('=').filter(|_| !word.starts_with('{')) {
        return Ok((name.into(), path.into()));
    }
    let json = Json::read(word.as_bytes())?;
    let of = |name: &str| json.map().and_then(|map| map.text(name)).map(str::to_owned);
    of("name").zip(of("path")).ok_or_else(|| Unsure::of("--lora-modules cannot be read"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(args: &[&str]) -> Result<Options, Unsure> {
        Options::of(Path::new("/m"), &args.iter().map(|&a| a.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn arguments_are_read_as_the_engine_reads_them() {
        let got = of(&[
            "--chat-template=/t.jinja",
            "--chat_template_content_format",
            "openai",
            "--default-chat-template-kwargs",
            r#"{"enable_thinking":false}"#,
            "--lora-modules",
            "a=/p",
            r#"{"name":"b","path":"/q"}"#,
            "--exclude-tools-when-tool-choice-none",
            "--enforce-eager",
        ])
        .unwrap();
        assert_eq!(got.template.as_deref(), Some("/t.jinja"));
        assert_eq!(got.parts, Some(true));
        assert_eq!(got.defaults.get("enable_thinking"), Some(&Json::Bool(false)));
        assert_eq!(got.adapters, [("a".into(), "/p".into()), ("b".into(), "/q".into())]);
        assert!(got.exclude_tools);
        let body = Map::from([("model", Json::from("b")), ("cache_salt", Json::from("s"))]);
        let extra = got.extra(&body).unwrap();
        assert_eq!(extra, Extra { salt: Some("s".into()), lora: Some(("b".into(), "/q".into())) });
    }

    #[test]
    fn what_is_not_followed_is_named() {
        for args in
            [["--tokenizer", "x"], ["--tokenizer_mode=mistral", ""], ["--default-chat-template-kwargs", "7"]]
        {
            assert!(of(&args).is_err(), "{args:?}");
        }
    }
}
