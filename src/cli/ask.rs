//! Asks the running node of this machine over its public port: one request, one answer, connection closed. All that a
//! command needs, without a runtime.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use super::out::{Exit, Told};
use crate::observe::state::NodeFile;

/// A node on this machine answers within milliseconds; a person waits no longer than this.
const PATIENCE: Duration = Duration::from_secs(5);

/// An order may write files, and a verification reads the drive between two lines of its answer.
const ORDER_PATIENCE: Duration = Duration::from_secs(60);

/// The state of two boxes is some 50 KiB; a listing without a limit is more.
const ANSWER_MAX: u64 = 64 << 20;

/// What a refusal may be long.
const REFUSAL_MAX: u64 = 64 << 10;

/// A node, and the key of its own user.
#[derive(Debug)]
pub(super) struct Running {
    pub url: String,
    key: String,
}

pub(super) fn not_found(what: String) -> anyhow::Error {
    Told { exit: Exit::NotFound, what }.into()
}

impl Running {
    /// A node of any machine. A key of ours would mean nothing to it; one of its API keys may lie in a file.
    pub fn at(url: &str, key_file: Option<&Path>) -> anyhow::Result<Self> {
        let key = match key_file {
            Some(file) => first_key(file)?,
            None => String::new(),
        };
        Ok(Self { url: url.to_owned(), key })
    }

    /// The node that has left its note here.
    pub fn find(node_file: &Path) -> anyhow::Result<Self> {
        let missing = |why: &dyn std::fmt::Display| {
            not_found(format!(
                "no running node: {} {why}; start one with `spark-kv up`, or name it with --root or --url",
                node_file.display()
            ))
        };
        let text = std::fs::read(node_file).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => missing(&"does not exist"),
            _ => missing(&format!("cannot be read: {error}")),
        })?;
        let file: NodeFile =
            serde_json::from_slice(&text).map_err(|error| missing(&format!("is damaged: {error}")))?;
        Ok(Self { url: file.url, key: file.key })
    }

    /// Whether anybody answers there: a node that was killed leaves its note behind.
    pub fn answers(&self) -> bool {
        self.host().is_ok_and(|host| connect(host).is_ok())
    }

    pub fn get(&self, path: &str) -> anyhow::Result<Vec<u8>> {
        let mut body = self.ask("GET", path, "", PATIENCE)?;
        let mut answer = Vec::new();
        body.read_to_end(&mut answer).map_err(|error| self.silent(&error))?;
        Ok(answer)
    }

    /// Sends an order, and shows each line of its answer as it comes.
    pub fn order(
        &self,
        path: &str,
        json: &str,
        mut line: impl FnMut(&str) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let body = self.ask("POST", path, json, ORDER_PATIENCE)?;
        for text in BufReader::new(body).lines() {
            line(&text.map_err(|error| self.silent(&error))?)?;
        }
        Ok(())
    }

    /// Sends an order, and gives all of its answer.
    pub fn order_whole(&self, path: &str, json: &str) -> anyhow::Result<String> {
        let mut answer = String::new();
        self.order(path, json, |line| {
            answer.push_str(line);
            Ok(())
        })?;
        Ok(answer)
    }

    fn host(&self) -> anyhow::Result<&str> {
        let rest = self.url.strip_prefix("http://").map(|rest| rest.split('/').next().unwrap_or_default());
        let what = || format!("`{}` must begin with `http://`", self.url);
        rest.ok_or_else(|| Told { exit: Exit::Usage, what: what() }.into())
    }

    fn silent(&self, error: &std::io::Error) -> anyhow::Error {
        not_found(format!("no running node answers at {}: {error}", self.url))
    }

    /// The body of an answer that is one; a refusal as the error that it is.
    fn ask(&self, verb: &str, path: &str, body: &str, patience: Duration) -> anyhow::Result<impl Read> {
        let silent = |error: std::io::Error| self.silent(&error);
        let host = self.host()?;
        let mut stream = connect(host).map_err(silent)?;
        stream.set_read_timeout(Some(patience)).map_err(silent)?;
        stream.set_write_timeout(Some(patience)).map_err(silent)?;
        let key = match self.key.as_str() {
            "" => String::new(),
            key => format!("Authorization: Bearer {key}\r\n"),
        };
        let content = match verb {
            "GET" => String::new(),
            _ => format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()),
        };
        let ask = format!(
            "{verb} {path} HTTP/1.0\r\nHost: {host}\r\n{key}{content}Accept: application/json\r\nConnection: close\r\n\r\n{body}"
        );
        stream.write_all(ask.as_bytes()).map_err(silent)?;
        let mut answer = BufReader::new(stream.take(ANSWER_MAX));
        let odd = |what: &str| not_found(format!("{} answers, but {what}", self.url));
        let head = read_head(&mut answer).map_err(silent)?.ok_or_else(|| odd("not as a web server does"))?;
        match head.split_whitespace().nth(1) {
            Some("200") => Ok(answer),
            Some("401") => Err(odd("wants an API key for its state (--key-file)")),
            Some("404") if verb == "GET" => {
                Err(odd(&format!("with 404 to {path}: it is of another version")))
            }
            code => {
                let mut text = String::new();
                let _ = answer.take(REFUSAL_MAX).read_to_string(&mut text);
                Err(match said(&text) {
                    Some(what) => anyhow::anyhow!(super::status::clean(&what)),
                    None => odd(&format!("with {} to {path}", code.unwrap_or("nonsense"))),
                })
            }
        }
    }
}

/// The first key of a file: a line that is one, or `name:key`. Never from the arguments, which everybody can see.
fn first_key(file: &Path) -> anyhow::Result<String> {
    let no_key = |why: String| -> anyhow::Error {
        Told { exit: Exit::Usage, what: format!("no API key in {}: {why}", file.display()) }.into()
    };
    let text = std::fs::read_to_string(file).map_err(|error| no_key(error.to_string()))?;
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let line = lines.next().ok_or_else(|| no_key("it is empty".to_owned()))?;
    let key = line.split_once(':').map_or(line, |(_, key)| key.trim());
    // It becomes part of a header.
    match key.chars().all(|c| c.is_ascii_graphic()) && !key.is_empty() {
        true => Ok(key.to_owned()),
        false => Err(no_key("its first line is no key".to_owned())),
    }
}

/// Up to and with the empty line. None where none comes.
fn read_head(answer: &mut impl BufRead) -> std::io::Result<Option<String>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() > 64 << 10 || answer.read_until(b'\n', &mut head)? == 0 {
            return Ok(None);
        }
    }
    Ok(Some(String::from_utf8_lossy(&head).into_owned()))
}

/// The message of a refusal in our shape.
fn said(body: &str) -> Option<String> {
    let body: serde_json::Value = serde_json::from_str(body).ok()?;
    body["error"]["message"].as_str().map(str::to_owned)
}

fn connect(host: &str) -> std::io::Result<TcpStream> {
    let with_port = if host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) {
        host.to_owned()
    } else {
        format!("{host}:80")
    };
    let mut last = std::io::Error::from(std::io::ErrorKind::NotFound);
    for address in with_port.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, PATIENCE) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}
