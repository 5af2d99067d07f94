//! JSON as the engine's Python sees it: objects in the order they were written, whole numbers apart from others, and
//! texts of values character for character as `json.dumps` and `repr` make them. A prompt shows all three.
//!
//! What cannot be told apart here (whole numbers beyond 64 bits, `-0`) or would be too intricate to print (characters
//! that `repr` may or may not escape) is refused: the caller then knows nothing instead of something wrong.

use std::fmt::{self, Write};
use std::sync::{Arc, LazyLock};

use hashbrown::HashMap;
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Serialize, Serializer};

use super::Unsure;

/// A value of a request's body.
#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Arc<str>),
    List(Vec<Json>),
    Map(Map),
}

/// An object: fields in their order. A field given twice stands where it stood first and means what it meant last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Map(Vec<(Arc<str>, Json)>);

/// Names that nearly every message has, kept once for all.
static COMMON: LazyLock<HashMap<&'static str, Arc<str>>> = LazyLock::new(|| {
    let names = [
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "tool_call_id",
        "id",
        "function",
        "name",
        "arguments",
        "reasoning",
        "reasoning_content",
        "description",
        "parameters",
        "properties",
        "required",
        "messages",
        "tools",
        "model",
        "cache_control",
        "input",
        "tool_use_id",
        "thinking",
        "signature",
    ];
    names.into_iter().map(|name| (name, name.into())).collect()
});

fn shared(name: &str) -> Arc<str> {
    COMMON.get(name).map_or_else(|| name.into(), Arc::clone)
}

/// A field's name as it is read.
struct Name(Arc<str>);

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl Visitor<'_> for Reader {
            type Value = Name;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Name, E> {
                Ok(Name(shared(name)))
            }
        }
        deserializer.deserialize_str(Reader)
    }
}

/// Fields up to which a scan finds a name sooner than a table.
const SCANNED_MAX: usize = 16;

impl Json {
    /// Reads a document.
    pub fn read(bytes: &[u8]) -> Result<Self, Unsure> {
        serde_json::from_slice(bytes).map_err(|error| Unsure::of(format!("the JSON is not clear: {error}")))
    }

    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn list(&self) -> Option<&[Self]> {
        match self {
            Self::List(list) => Some(list),
            _ => None,
        }
    }

    pub fn map(&self) -> Option<&Map> {
        match self {
            Self::Map(map) => Some(map),
            _ => None,
        }
    }

    /// As a template sees it. Texts are shared, not copied.
    pub fn to_value(&self) -> Value {
        match self {
            Self::Null => Value::from(()),
            Self::Bool(b) => Value::from(*b),
            Self::Int(n) => Value::from(*n),
            Self::Float(x) => Value::from(*x),
            Self::Text(text) => Value::from(Arc::clone(text)),
            Self::List(list) => list.iter().map(Self::to_value).collect(),
            Self::Map(map) => map.to_value(),
        }
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl Map {
    pub fn get(&self, name: &str) -> Option<&Json> {
        self.0.iter().find(|(key, _)| &**key == name).map(|(_, value)| value)
    }

    /// The field, unless it is missing or null: the two mean the same wherever the engine has a default.
    pub fn given(&self, name: &str) -> Option<&Json> {
        self.get(name).filter(|value| **value != Json::Null)
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name)?.text()
    }

    pub fn set(&mut self, name: &str, value: Json) {
        match self.0.iter_mut().find(|(key, _)| &**key == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((shared(name), value)),
        }
    }

    pub fn remove(&mut self, name: &str) {
        self.0.retain(|(key, _)| &**key != name);
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Json)> {
        self.0.iter().map(|(name, value)| (name, value))
    }

    /// The fields of `first`, in that order, then all others in theirs: how the engine's typed dictionaries come out
    /// of its validation.
    pub fn typed(&self, first: &[&str]) -> Self {
        let known = first.iter().filter_map(|name| self.0.iter().find(|(key, _)| &**key == *name));
        let rest = self.0.iter().filter(|(key, _)| !first.contains(&&**key));
        Self(known.chain(rest).cloned().collect())
    }

    pub fn to_value(&self) -> Value {
        Value::from_pairs(
            self.0.iter().map(|(name, value)| (Value::from(Arc::clone(name)), value.to_value())),
        )
    }
}

impl<const N: usize> From<[(&str, Json); N]> for Map {
    fn from(fields: [(&str, Json); N]) -> Self {
        Self(fields.into_iter().map(|(name, value)| (shared(name), value)).collect())
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => serializer.serialize_unit(),
            Self::Bool(b) => serializer.serialize_bool(*b),
            Self::Int(n) => serializer.serialize_i64(*n),
            Self::Float(x) => serializer.serialize_f64(*x),
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(list) => serializer.collect_seq(list),
            Self::Map(map) => serializer.collect_map(map.iter().map(|(name, value)| (&**name, value))),
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }
    fn visit_unit<E: de::Error>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }
    fn visit_bool<E: de::Error>(self, b: bool) -> Result<Json, E> {
        Ok(Json::Bool(b))
    }
    fn visit_i64<E: de::Error>(self, n: i64) -> Result<Json, E> {
        Ok(Json::Int(n))
    }
    fn visit_u64<E: de::Error>(self, n: u64) -> Result<Json, E> {
        i64::try_from(n).map(Json::Int).map_err(|_| E::custom("a whole number beyond 63 bits"))
    }
    fn visit_f64<E: de::Error>(self, x: f64) -> Result<Json, E> {
        // The reader below hands over as fractions what Python keeps whole: `-0`, and what does not fit 64 bits.
        let unclear = (x == 0.0 && x.is_sign_negative()) || x.abs() >= 9.2e18;
        if unclear { Err(E::custom("a number that may be whole or not")) } else { Ok(Json::Float(x)) }
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.into()))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = seq.next_element()? {
            list.push(value);
        }
        Ok(Json::List(list))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut fields: Vec<(Arc<str>, Json)> = Vec::new();
        let mut places: HashMap<Arc<str>, usize> = HashMap::new();
        while let Some((Name(name), value)) = map.next_entry::<Name, Json>()? {
            if fields.len() == SCANNED_MAX && places.is_empty() {
                places = fields.iter().enumerate().map(|(at, (name, _))| (Arc::clone(name), at)).collect();
            }
            let place = match fields.len() < SCANNED_MAX {
                true => fields.iter().position(|(known, _)| *known == name),
                false => places.get(&name).copied(),
            };
            match place {
                Some(at) => fields[at].1 = value,
                None => {
                    if fields.len() >= SCANNED_MAX {
                        places.insert(Arc::clone(&name), fields.len());
                    }
                    fields.push((name, value));
                }
            }
        }
        Ok(Json::Map(Map(fields)))
    }
}

/// How `json.dumps` is asked to write.
#[derive(Clone, Debug, Default)]
pub struct Dumps {
    pub ensure_ascii: bool,
    pub indent: Option<String>,
    pub separators: Option<(String, String)>,
    pub sort_keys: bool,
}

impl Dumps {
    /// The text of a template's value.
    pub fn write(&self, value: &Value) -> Result<String, String> {
        let mut out = String::new();
        self.value(&mut out, value, 0)?;
        Ok(out)
    }

    fn value(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), String> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)?),
            ValueKind::String => self.text(out, value.as_str().ok_or("a text that is none")?),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter().map_err(|error| error.to_string())?.collect();
                self.all(out, ['[', ']'], &items, depth, |out, item| self.value(out, item, depth + 1))?;
            }
            ValueKind::Map => self.map(out, value, depth)?,
            other => return Err(format!("a value of kind {other} has no JSON form")),
        }
        Ok(())
    }

    fn map(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), String> {
        let mut names: Vec<Value> = value.try_iter().map_err(|error| error.to_string())?.collect();
        if names.iter().any(|name| name.as_str().is_none()) {
            return Err("an object whose names are not texts".into());
        }
        if self.sort_keys {
            names.sort_by(|a, b| a.as_str().cmp(&b.as_str()));
        }
        let colon = self.separators.as_ref().map_or(": ", |(_, colon)| colon);
        self.all(out, ['{', '}'], &names, depth, |out, name| {
            self.text(out, name.as_str().unwrap_or_default());
            out.push_str(colon);
            self.value(out, &value.get_item(name).map_err(|error| error.to_string())?, depth + 1)
        })
    }

    fn all(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut String, &Value) -> Result<(), String>,
    ) -> Result<(), String> {
        // Deeper than any request that could be read; a template can build more.
        if depth > 200 {
            return Err("a value nested too deep".into());
        }
        let comma = match (&self.separators, &self.indent) {
            (Some((comma, _)), _) => comma,
            (None, Some(_)) => ",",
            (None, None) => ", ",
        };
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        out.push(open);
        for (n, item) in items.iter().enumerate() {
            if n > 0 {
                out.push_str(comma);
            }
            line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn number(value: &Value) -> Result<String, String> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let x = f64::try_from(value.clone()).map_err(|error| error.to_string())?;
    Ok(float(x))
}

/// A float as Python's `repr` and `json.dumps` write it: the shortest digits that read back, plain between 1e-4 and
/// 1e16, else with an exponent of two digits at least.
pub fn float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    let short = format!("{x:e}");
    let (digits, exponent) = short.split_once('e').unwrap_or((&short, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

/// A value as Python's `str` shows it, which is how a template prints it.
pub fn shown(value: &Value) -> Result<String, String> {
    match value.kind() {
        ValueKind::String => Ok(value.to_string()),
        ValueKind::Undefined => Ok(String::new()),
        _ => repr(value, 0),
    }
}

fn repr(value: &Value, depth: usize) -> Result<String, String> {
    if depth > 200 {
        return Err("a value nested too deep".into());
    }
    match value.kind() {
        ValueKind::None => Ok("None".into()),
        ValueKind::Bool => Ok(if value.is_true() { "True".into() } else { "False".into() }),
        ValueKind::Number => match number(value)?.as_str() {
            "NaN" => Ok("nan".into()),
            "Infinity" => Ok("inf".into()),
            "-Infinity" => Ok("-inf".into()),
            plain => Ok(plain.into()),
        },
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let items = value.try_iter().map_err(|error| error.to_string())?;
            let items: Result<Vec<String>, String> = items.map(|item| repr(&item, depth + 1)).collect();
            Ok(format!("[{}]", items?.join(", ")))
        }
        ValueKind::Map => {
            let mut items = Vec::new();
            for name in value.try_iter().map_err(|error| error.to_string())? {
                let item = value.get_item(&name).map_err(|error| error.to_string())?;
                items.push(format!("{}: {}", repr(&name, depth + 1)?, repr(&item, depth + 1)?));
            }
            Ok(format!("{{{}}}", items.join(", ")))
        }
        other => Err(format!("a value of kind {other} is printed")),
    }
}

/// `repr` of a text. Which characters beyond ASCII it escapes depends on Python's tables: letters and digits never.
fn quoted(text: &str) -> Result<String, String> {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            ' '..='~' => out.push(c),
            c if c.is_ascii() => {
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c if c.is_alphanumeric() => out.push(c),
            c => return Err(format!("{c:?} in a text that is printed inside a list")),
        }
    }
    out.push(quote);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dumps(text: &str, dumps: &Dumps) -> String {
        dumps.write(&Json::read(text.as_bytes()).unwrap().to_value()).unwrap()
    }

    /// Each right side was printed by Python's `json.dumps(json.loads(left), ensure_ascii=False)`.
    #[test]
    fn values_are_written_as_python_writes_them() {
        for (left, right) in [
            (r#"{"b":1,"a":[true,null,-7]}"#, r#"{"b": 1, "a": [true, null, -7]}"#),
            (
                "[1.0,1e-7,2.50,1e16,1e15,123456789.125,1e-4,0.00001,1.5e-300,5e-324]",
                "[1.0, 1e-07, 2.5, 1e+16, 1000000000000000.0, 123456789.125, 0.0001, 1e-05, 1.5e-300, 5e-324]",
            ),
            (r#"["ü\u007f\u0001\n\"\\/ \u2028 😀"]"#, "[\"ü\u{7f}\\u0001\\n\\\"\\\\/ \u{2028} 😀\"]"),
            (r#"{"a":1,"b":2,"a":3}"#, r#"{"a": 3, "b": 2}"#),
            ("[[],{},\"\"]", "[[], {}, \"\"]"),
        ] {
            assert_eq!(dumps(left, &Dumps::default()), right);
        }
    }

    #[test]
    fn indent_separators_order_and_ascii_are_as_asked() {
        let text = r#"{"b":[1,{"c":[]}],"a":"ü😀"}"#;
        let indented = Dumps { indent: Some("  ".into()), ..Dumps::default() };
        assert_eq!(
            dumps(text, &indented),
            "{\n  \"b\": [\n    1,\n    {\n      \"c\": []\n    }\n  ],\n  \"a\": \"ü😀\"\n}"
        );
        let tight = Dumps {
            separators: Some((",".into(), ":".into())),
            sort_keys: true,
            ensure_ascii: true,
            indent: None,
        };
        assert_eq!(dumps(text, &tight), r#"{"a":"\u00fc\ud83d\ude00","b":[1,{"c":[]}]}"#);
    }

    #[test]
    fn what_python_would_read_otherwise_is_refused() {
        for text in ["-0", "18446744073709551616", "9223372036854775808", "1e400", r#""\ud800""#, "{", "NaN"]
        {
            assert!(Json::read(text.as_bytes()).is_err(), "{text}");
        }
        assert_eq!(Json::read(b"-7").unwrap(), Json::Int(-7));
    }

    #[test]
    fn printing_shows_what_str_shows() {
        let value = Json::read(br#"[true,null,1.0,"it's","a\"b'c",{"k":[1]}]"#).unwrap().to_value();
        assert_eq!(shown(&value).unwrap(), r#"[True, None, 1.0, "it's", 'a"b\'c', {'k': [1]}]"#);
        assert_eq!(shown(&Value::from("plain 😀")).unwrap(), "plain 😀");
        assert!(shown(&Json::read("[\"😀\"]".as_bytes()).unwrap().to_value()).is_err());
    }

    #[test]
    fn a_field_given_twice_among_many_means_its_last_at_its_first_place() {
        let mut text: Vec<String> = (0..40).map(|n| format!("\"k{n}\":{n}")).collect();
        text.push("\"k3\":99".into());
        text.push("\"k30\":98".into());
        let json = Json::read(format!("{{{}}}", text.join(",")).as_bytes()).unwrap();
        let map = json.map().unwrap();
        assert_eq!(map.iter().count(), 40);
        assert_eq!(map.iter().nth(3).unwrap().1, &Json::Int(99));
        assert_eq!(map.iter().nth(30).unwrap().1, &Json::Int(98));
    }

    proptest::proptest! {
        #[test]
        fn floats_read_back(x: f64) {
            proptest::prop_assume!(x.is_finite());
            proptest::prop_assert_eq!(float(x).parse::<f64>().unwrap(), x);
        }
    }
}
