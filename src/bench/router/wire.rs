//! Both ends of the measurement: a client that asks on one connection, and a backend that answers at once.
//!
//! As little HTTP as the two need, so that what is measured is the router between them: lengths on requests, lengths
//! or chunks on answers, connections that stay open.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::router::Endpoint;
use crate::router::tokens::Speaker;
use crate::tasks::{Kind, Tasks};

/// A request as it goes over the wire.
pub fn request(path: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// A client's connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
    answer: Vec<u8>,
}

impl Client {
    pub async fn connect(to: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(to).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, answer: Vec::with_capacity(4096) })
    }

    /// Sends a request and takes its whole answer, which must be a 200.
    pub async fn ask(&mut self, request: &[u8]) -> io::Result<()> {
        self.stream.write_all(request).await?;
        self.answer.clear();
        while !whole(&self.answer)? {
            if self.stream.read_buf(&mut self.answer).await? == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed"));
            }
        }
        match self.answer.get(9..12) {
            Some(b"200") => Ok(()),
            _ => Err(io::Error::other(
                String::from_utf8_lossy(&self.answer).chars().take(300).collect::<String>(),
            )),
        }
    }

    /// The answer that came last, head and body.
    pub fn answer(&self) -> &[u8] {
        &self.answer
    }
}

/// Where the head ends.
fn head(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4)
}

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// Whether an answer, or a request, has come whole.
fn whole(bytes: &[u8]) -> io::Result<bool> {
    let Some(end) = head(bytes) else { return Ok(false) };
    let odd = || io::Error::other("a head that is no text");
    let head = std::str::from_utf8(&bytes[..end]).map_err(|_| odd())?;
    if let Some(length) = field(head, "content-length") {
        return Ok(bytes.len() >= end + length.parse::<usize>().map_err(io::Error::other)?);
    }
    if field(head, "transfer-encoding").is_some() {
        return Ok(bytes.ends_with(b"\r\n0\r\n\r\n"));
    }
    Ok(true)
}

/// What backends serve.
pub struct Served {
    pub model: String,
    pub speaker: Speaker,
}

/// A backend that answers each request at once with the same few words, says that it is well, and what its tokens are.
pub async fn backend(served: Arc<Served>, tasks: &Tasks) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let spawner = tasks.clone();
    tasks.spawn(Kind::Chore, "backend", async move {
        while let Ok((stream, _)) = listener.accept().await {
            let served = Arc::clone(&served);
            spawner.spawn(Kind::Chore, "backend's connection", async move {
                // A router that goes away in the middle is its affair.
                let _ = serve(stream, &served).await;
            });
        }
    });
    Ok(address)
}

async fn serve(mut stream: TcpStream, served: &Served) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let said = json!({"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": served.model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}]});
    let said = answer(&said.to_string());
    let mut taken = Vec::with_capacity(1 << 16);
    loop {
        taken.clear();
        while !whole(&taken)? {
            if stream.read_buf(&mut taken).await? == 0 {
                return Ok(());
            }
        }
        let path = taken.split(|byte| *byte == b' ').nth(1).unwrap_or_default();
        match path {
            b"/v1/chat/completions" => stream.write_all(&said).await?,
            path => {
                let path = String::from_utf8_lossy(path).into_owned();
                stream.write_all(&other(&path, &taken, served)).await?;
            }
        }
    }
}

fn other(path: &str, request: &[u8], served: &Served) -> Vec<u8> {
    match path {
        "/v1/models" => {
            let model = json!({"id": served.model, "object": "model", "max_model_len": 1 << 20});
            answer(&json!({"object": "list", "data": [model]}).to_string())
        }
        "/tokenize" => {
            let body = &request[head(request).unwrap_or(0)..];
            match served.speaker.prompt(Endpoint::Tokenize, body) {
                Ok(prompt) => answer(&json!({"count": prompt.ids.len(), "tokens": prompt.ids}).to_string()),
                Err(_) => b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}".to_vec(),
            }
        }
        _ => answer("{}"),
    }
}

fn answer(body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_message_is_found_by_length_and_by_chunks() {
        let with_length = request("/x", b"{\"a\":1}");
        for n in 0..with_length.len() {
            assert!(!whole(&with_length[..n]).unwrap(), "{n}");
        }
        assert!(whole(&with_length).unwrap());
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
        assert!(whole(chunked).unwrap() && !whole(&chunked[..chunked.len() - 3]).unwrap());
    }
}
