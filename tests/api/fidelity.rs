//! What goes through the router and comes back, item by item: the ones that other routers drop, rename or add to.

use super::*;

/// Items of a body, by what they are, as they stand in it. `#` stands for nothing: the body is sent with it left out.
const ITEMS: [(&str, &str); 13] = [
    ("unknown fields", r#""x_new":{"a":[1,2.50,null]},"nvext":{} ,"#),
    (
        "salt, priority and the engine's own",
        r#""cache_salt":"s","priority":-3,"vllm_xargs":{"k":"v"},"kv_transfer_params":{"do":true},"#,
    ),
    ("user and metadata", r#""user":"me","metadata":{"user_id":"you"},"prompt_cache_key":"k","#),
    ("max_tokens", r#""max_tokens":17,"#),
    ("max_completion_tokens", r#""max_completion_tokens":17,"#),
    ("a number as it is spelled", r#""temperature":0.10000000149,"top_p":1.0,"seed":12345678901234567890,"#),
    ("exponents", r#""logit_bias":{"50256":-1E+2,"7":1e400},"#),
    (
        "strict tools",
        r#""tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":{"b":1,"a":2}}}],"tool_choice":"auto","#,
    ),
    (
        "reasoning of the body",
        r#""reasoning":{"effort":"high"},"reasoning_effort":"high","include_reasoning":false,"#,
    ),
    (
        "template arguments",
        r#""chat_template_kwargs":{"enable_thinking":false},"continue_final_message":false,"#,
    ),
    ("spaces and escapes", "\"stop\" :\t[ \"\\u00e4\\/\\ud83d\\ude00 \u{e4}\" ]\r\n,"),
    ("a field given twice", r#""n":1,"n":1,"#),
    ("nothing", ""),
];

/// Messages, by what is in them.
const MESSAGES: [(&str, &str); 6] = [
    (
        "both spellings of reasoning",
        r#"{"role":"assistant","reasoning":"r","reasoning_content":"c","content":"x"}"#,
    ),
    (
        "no content beside calls",
        r#"{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\": 1.0}"}}]}"#,
    ),
    ("unknown fields", r#"{"role":"user","content":"x","x_new":1.00,"name":"n"}"#),
    (
        "marks of a cache",
        r#"{"role":"user","content":[{"type":"text","text":"x","cache_control":{"type":"ephemeral"}}]}"#,
    ),
    (
        "pictures",
        r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA==","detail":"low"}}]}"#,
    ),
    ("an unknown role and part", r#"{"role":"critic","content":[{"type":"x_new","y":[]}]}"#),
];

const POSTED: [&str; 3] = [CHAT, "/v1/completions", "/v1/messages"];

#[tokio::test]
async fn every_item_of_a_body_reaches_the_engine_as_it_came() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    let user = r#"{"role":"user","content":"hi"}"#;
    let bodies =
        ITEMS.iter().map(|(name, item)| (*name, format!("{{{item}\"model\":\"m\",\"messages\":[{user}]}}")));
    let turns = MESSAGES
        .iter()
        .map(|(name, turn)| (*name, format!("{{\"model\":\"m\",\"messages\":[{user},{turn}]}}")));
    let all: Vec<(&str, String)> = bodies.chain(turns).collect();
    for path in POSTED {
        for (name, body) in &all {
            let client = node.post(path, body).await;
            let exchange = engine.next().await;
            assert_eq!(exchange.body, body.as_bytes(), "{path}: {name}");
            exchange.reply.send(answer(200, "application/json", body)).unwrap();
            let answer = client.answer().await;
            assert_eq!((answer.status, answer.text()), (200, body.clone()), "{path}: {name}");
        }
    }
}

#[tokio::test]
async fn a_stream_is_asked_for_with_nothing_but_its_usage() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    for (name, item) in ITEMS {
        let asked = format!(
            "{{{item}\"stream\":true,\"stream_options\":{{\"include_usage\":true}},\"model\":\"m\",\"prompt\":\"x\"}}"
        );
        let silent = format!("{{{item}\"stream\":true,\"model\":\"m\",\"prompt\":\"x\"}}");
        let added = format!("{{\"stream_options\":{{\"include_usage\":true}},{}", &silent[1..]);
        for (body, wanted) in [(&asked, &asked), (&silent, &added)] {
            let client = node.post("/v1/completions", body).await;
            let exchange = engine.next().await;
            assert_eq!(exchange.body, wanted.as_bytes(), "{name}");
            exchange.reply.send(answer(200, "application/json", "{}")).unwrap();
            client.answer().await;
        }
    }
}

#[tokio::test]
async fn headers_pass_both_ways() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    let sent = [
        ("authorization", "Bearer of-the-engine"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("x-session-id", "s"),
        ("anthropic-version", "2023-06-01"),
        ("anthropic-beta", "a,b"),
        ("x-stainless-retry-count", "0"),
        ("user-agent", "me/1.0"),
        ("accept", "*/*"),
        ("x-new", "v\u{a0}w"),
    ];
    let head: String = sent.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let client =
        node.send(&format!("POST {CHAT}?a=%20b&&c HTTP/1.1\r\nx-new: first\r\n{head}"), HI.as_bytes()).await;
    let exchange = engine.next().await;
    assert_eq!(exchange.target, format!("{CHAT}?a=%20b&&c"));
    for (name, value) in sent {
        let last = exchange.headers.get_all(name).iter().next_back().unwrap();
        assert_eq!(last.as_bytes(), value.as_bytes(), "{name}");
    }
    assert_eq!(exchange.headers.get_all("x-new").iter().count(), 2);
    let mut response = answer(200, "application/json; charset=x", "{}");
    for (name, value) in
        [("x-ratelimit-remaining", "7"), ("openai-processing-ms", "5"), ("x-request-id", "theirs")]
    {
        response.headers_mut().append(name, value.parse().unwrap());
    }
    exchange.reply.send(response).unwrap();
    let answer = client.answer().await;
    for (name, value) in [
        ("x-ratelimit-remaining", "7"),
        ("openai-processing-ms", "5"),
        ("content-type", "application/json; charset=x"),
    ] {
        assert_eq!(answer.header(name), Some(value));
    }
}

#[tokio::test]
async fn as_many_events_come_as_were_sent() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    let asked = STREAM.replace("true", "true,\"stream_options\":{\"include_usage\":true}");
    let mut client = node.post(CHAT, &asked).await;
    let exchange = engine.next().await;
    let (events, response) = events();
    exchange.reply.send(response).unwrap();
    let mut wanted = Vec::new();
    for n in 0..31 {
        let event = format!("data: {{\"n\": {n}.0, \"usage\":null}}\n\n");
        events.send(event.clone().into()).await.unwrap();
        // Each is there before the next one is made.
        client.see(&event).await;
        wanted.push(event);
    }
    drop(events);
    assert_eq!(client.answer().await.chunks(), wanted);
}

#[tokio::test]
async fn an_engine_that_refuses_is_asked_once() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    for status in [400, 404, 413, 422, 429, 500] {
        let client = node.post(CHAT, HI).await;
        let said = format!("{{\"error\": {{\"code\":{status}, \"x\":1.0}} }}");
        let mut response = answer(status, "application/json", &said);
        response.headers_mut().insert("retry-after", "1".parse().unwrap());
        engine.next().await.reply.send(response).unwrap();
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text()), (status, said));
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert!(engine.untouched(), "{status} was tried again");
    }
}

#[tokio::test]
async fn a_hang_up_ends_the_work_upstream_and_a_death_is_told() {
    let tasks = Tasks::new();
    let mut engine = Engine::start(&tasks).await;
    let node = Node::alone(&tasks, &engine.url).await;
    for body in [HI, STREAM] {
        let client = node.post(CHAT, body).await;
        let exchange = engine.next().await;
        drop(client);
        let _ = soon("the engine to be left", exchange.gone).await;
    }
    let mut client = node.post(CHAT, STREAM).await;
    let exchange = engine.next().await;
    let (die, dies) = oneshot::channel::<()>();
    let first = futures_util::stream::iter([Ok(Bytes::from_static(b"data: {\"a\":1}\n\n"))]);
    let death = futures_util::stream::once(async {
        let _ = dies.await;
        Err(std::io::Error::other("dies"))
    });
    let frames = first.chain(death);
    let response = Response::builder().header("content-type", "text/event-stream");
    exchange.reply.send(response.body(Body::from_stream(frames)).unwrap()).unwrap();
    client.see("data: {\"a\":1}").await;
    die.send(()).unwrap();
    let said = client.answer().await.events();
    assert!(said.contains("broke off") && !said.contains("[DONE]"), "{said}");
}
