//! The model's chat template, rendered as the engine renders it: Jinja with `trim_blocks` and `lstrip_blocks`, the
//! `tojson` of Hugging Face (plain `json.dumps`), `raise_exception`, `strftime_now`, loop controls and Python's
//! methods of texts, lists and dictionaries.
//!
//! Where this Jinja is known to differ from Python's (what is printed for true, none, floats and lists; which values
//! count as sequences) it is brought in line; where it cannot be, the answer is [`Unsure`]. A template that loops
//! without end runs out of fuel.

use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, Value};

use super::Unsure;
use super::json::{self, Dumps};

/// Formats the present time as Python's `datetime.now().strftime`. None: there is no clock or no such form.
pub type Now = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// Steps of one rendering: a hundred for each of the 100,000 lines that the longest prompts have.
const FUEL: u64 = 10_000_000;

const NAME: &str = "chat";

/// A compiled template.
#[derive(Debug)]
pub struct Template {
    env: Environment<'static>,
    /// It names the role itself, in quotes: that is how the engine tells.
    pub knows_developer: bool,
    /// Whether a message's content is better handed over as a list of parts. Guessed from the text; the proof against
    /// the engine decides.
    pub wants_parts: bool,
    /// Whether system messages must be merged into the first: the engine tries it, so do we.
    pub system_first: bool,
    /// It has a place where a last message can be continued.
    pub shows_content: bool,
}

impl Template {
    pub fn new(source: &str, now: Now) -> Result<Self, Unsure> {
        let text = without_generation_tags(source);
        let env = environment(text.clone(), Some(now))?;
        Ok(Self {
            knows_developer: source.contains("\"developer\"") || source.contains("'developer'"),
            wants_parts: loops_over_content(source),
            // Without the functions of Hugging Face, and the tag unknown: as the engine's own test has it.
            system_first: text != source
                || environment(text, None).is_ok_and(|bare| refuses_late_system(&bare)),
            shows_content: source.contains("content"),
            env,
        })
    }

    pub fn render(&self, variables: Value) -> Result<String, Unsure> {
        let template = self.env.get_template(NAME).map_err(|error| unsure(&error))?;
        template.render(variables).map_err(|error| unsure(&error))
    }
}

fn unsure(error: &Error) -> Unsure {
    Unsure::of(format!("the template: {}", error.detail().map_or_else(|| error.to_string(), str::to_owned)))
}

fn environment(source: String, functions: Option<Now>) -> Result<Environment<'static>, Unsure> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.map_err(|error| unsure(&error))?);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_fuel(Some(FUEL));
    env.set_formatter(|out, _, value| {
        // Nearly all that is printed is text: it needs no copy on its way.
        if let Some(text) = value.as_str() {
            return out.write_str(text).map_err(Error::from);
        }
        let text = json::shown(value).map_err(invalid)?;
        out.write_str(&text).map_err(Error::from)
    });
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: Value| json::shown(&value).map_err(invalid));
    // Python's texts have a length and items, and so count as sequences.
    env.add_test("sequence", |v: &Value| {
        matches!(v.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
    });
    env.add_test("iterable", |v: &Value| {
        matches!(
            v.kind(),
            ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined | ValueKind::Iterable
        )
    });
    if let Some(now) = functions {
        env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
            Err(invalid(format!("refuses: {message}")))
        });
        env.add_function("strftime_now", move |format: &str| {
            now(format).ok_or_else(|| invalid(format!("asks for the time as `{format}`")))
        });
    }
    env.add_template_owned(NAME, source).map_err(|error| unsure(&error))?;
    Ok(env)
}

fn invalid(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.into())
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(_: &State<'_, '_>, value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if positional.len() > NAMES.len() {
        return Err(invalid("tojson with too many arguments"));
    }
    let argument = |at: usize| -> Result<Option<Value>, Error> {
        let given = positional.get(at).cloned();
        let given = if given.is_some() { given } else { named.get::<Option<Value>>(NAMES[at])? };
        Ok(given.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let indent = match argument(1)? {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(count) => Some(" ".repeat(usize::try_from(i64::try_from(count)?.clamp(0, 64)).unwrap_or(0))),
    };
    let separators = match argument(2)? {
        None => None,
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match pair.as_slice() {
                [comma, colon] => Some((comma.to_string(), colon.to_string())),
                _ => return Err(invalid("separators that are no pair")),
            }
        }
    };
    let dumps = Dumps {
        ensure_ascii: argument(0)?.is_some_and(|v| v.is_true()),
        indent,
        separators,
        sort_keys: argument(3)?.is_some_and(|v| v.is_true()),
    };
    named.assert_all_used()?;
    dumps.write(value).map(Value::from).map_err(invalid)
}

/// `{% generation %}` marks what a model wrote, for training; it prints its inside. A block that is always true does
/// the same, with the same whitespace around it.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else { break };
        let (inside, marks) = (&tag[2..end], ['-', '+']);
        let word = inside.trim_start_matches(marks).trim_end_matches(marks).trim();
        let instead = match word {
            "generation" => inside.replace("generation", "if true"),
            "endgeneration" => inside.replace("endgeneration", "endif"),
            _ => inside.to_owned(),
        };
        out.push_str("{%");
        out.push_str(&instead);
        out.push_str("%}");
        rest = &tag[end + 2..];
    }
    out.push_str(rest);
    out
}

/// Whether there is a `for … in` over something's content.
fn loops_over_content(source: &str) -> bool {
    source.match_indices("{%").any(|(at, _)| {
        let tag = &source[at..];
        let tag = &tag[..tag.find("%}").unwrap_or(0)];
        let words: Vec<&str> = tag.trim_start_matches(['{', '%', '-', '+']).split_whitespace().collect();
        let Some(at) = words.iter().position(|word| *word == "in") else { return false };
        let over = words.get(at + 1).map_or("", |word| word.trim_end_matches('-'));
        words.first() == Some(&"for")
            && (over == "content"
                || [".content", "['content']", "[\"content\"]"].iter().any(|end| over.ends_with(end)))
    })
}

fn refuses_late_system(bare: &Environment<'_>) -> bool {
    let message = |role: &str| Value::from_pairs([("role", role), ("content", "t")]);
    let messages: Value = ["system", "user", "system", "user"].into_iter().map(message).collect();
    let variables =
        Value::from_pairs([("messages", messages), ("add_generation_prompt", Value::from(false))]);
    bare.get_template(NAME).and_then(|template| template.render(variables)).is_err()
}

#[cfg(test)]
mod tests {
    use super::super::json::Json;
    use super::*;

    fn rendered(source: &str, variables: &str) -> Result<String, Unsure> {
        let now: Now = Arc::new(|format| (format == "%Y").then(|| "2031".to_owned()));
        let variables = Json::read(variables.as_bytes()).unwrap().to_value();
        Template::new(source, now)?.render(variables)
    }

    /// Each right side was printed by Jinja 3.1 with the settings of Hugging Face.
    #[test]
    fn it_renders_as_jinja_does() {
        for (source, variables, right) in [
            (
                "{{ a }} {{ b }} {{ c }} {{ d }}|{{ e }}",
                r#"{"a":true,"b":null,"c":1.0,"d":[1,"x"]}"#,
                "True None 1.0 [1, 'x']|",
            ),
            (
                "{%- if a is sequence %}s{% endif %}{% if a is iterable %}i{% endif %}{% if a is mapping %}m{% endif %}",
                r#"{"a":"text"}"#,
                "si",
            ),
            ("a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "{}", "a\n  b\nc"),
            (
                "{{ x | tojson }} {{ x | tojson(indent=1) }}",
                r#"{"x":{"b":1,"a":"<&>"}}"#,
                "{\"b\": 1, \"a\": \"<&>\"} {\n \"b\": 1,\n \"a\": \"<&>\"\n}",
            ),
            (
                "{% set ns = namespace(n=0) %}{% for i in x %}{% if i == 2 %}{% continue %}{% endif %}{% set ns.n = ns.n + i %}{% if i > 3 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}",
                r#"{"x":[1,2,3,4,5]}"#,
                "8",
            ),
            (
                "{{ x.split('</think>')[-1].lstrip('\\n') }}|{{ x[:2] }}|{{ x.startswith('a') }}",
                r#"{"x":"ab</think>\n\nc"}"#,
                "c|ab|True",
            ),
            (
                "{% for m in x[::-1] %}{{ loop.index0 }}{{ m }}{{ loop.last }}{% endfor %}",
                r#"{"x":["a","b"]}"#,
                "0bFalse1aTrue",
            ),
            (
                "{% for k, v in x.items() %}{{ k }}={{ v }};{% endfor %}{% for k, v in x|items %}{{ k }}{% endfor %}",
                r#"{"x":{"z":1,"a":"b"}}"#,
                "z=1;a=b;za",
            ),
            (
                "{% macro m(a, b='q') %}<{{ a }}{{ b }}>{% endmacro %}{{ m('x') }}{{ m('x', b='y') }}",
                "{}",
                "<xq><xy>",
            ),
            ("{%- generation -%} x {%- endgeneration -%}", "{}", "x"),
            ("{{ strftime_now('%Y') }}", "{}", "2031"),
            ("{{ x.get('a', 'no') }}{{ x.b is defined }}{{ x.b | default('d') }}", r#"{"x":{}}"#, "noFalsed"),
            (
                "{{ x | selectattr('r', 'equalto', 'u') | list | length }}{{ x | map(attribute='r') | join(',') }}",
                r#"{"x":[{"r":"u"},{"r":"v"}]}"#,
                "1u,v",
            ),
            ("{{ 'a' ~ 1 ~ 'b' }}{{ x | string + '!' }}{{ x|trim }}", r#"{"x":" 7 "}"#, "a1b 7 !7"),
        ] {
            assert_eq!(rendered(source, variables).unwrap(), right, "{source}");
        }
    }

    #[test]
    fn what_a_template_refuses_or_never_ends_is_no_answer() {
        for (source, part) in [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{% for a in range(9000) %}{% for b in range(9000) %}{% endfor %}{% endfor %}", "fuel"),
            ("{{ strftime_now('%Q') }}", "time"),
            ("{{ nothing.at.all }}", "undefined"),
            ("{% nonsense %}", "nonsense"),
            ("{{ x | tojson }}", "JSON"),
        ] {
            let why = rendered(source, "{}").unwrap_err().to_string();
            assert!(why.contains(part), "{source}: {why}");
        }
    }

    #[test]
    fn what_a_template_wants_is_seen_in_its_text() {
        let now: Now = Arc::new(|_| None);
        let of = |source: &str| Template::new(source, Arc::clone(&now)).unwrap();
        assert!(of("{% for p in m['content'] %}{% endfor %}").wants_parts);
        assert!(of("{%- for part in content -%}{%- endfor %}").wants_parts);
        assert!(!of("{% for m in messages %}{{ m.content }}{% endfor %}").wants_parts);
        assert!(of("{% if m.role == 'developer' %}{% endif %}").knows_developer);
        let first = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}{% endfor %}";
        assert!(of(first).system_first);
        assert!(!of("{% for m in messages %}{{ m.content }}{% endfor %}").system_first);
    }
}
