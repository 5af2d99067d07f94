//! Conversations of a few turns, each with one thing that makes it miss.

use serde_json::{Value, json};

use super::*;
use crate::router::Endpoint;

const GRAIN: u32 = 16;

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text, "reasoning": format!("thought of {text}")})
}

fn long(text: &str) -> String {
    format!("{text} ").repeat(400)
}

/// A body of two tools, a system prompt of five lines and these turns.
fn body(turns: &[Value]) -> Value {
    let system = format!("You are kind.\nToday is Tuesday.\n{}\nBe short.\nEnd.", long("rule"));
    let messages = [&[json!({"role": "system", "content": system})], turns].concat();
    json!({"model": "m", "tools": [{"name": "read"}, {"name": "write"}], "messages": messages})
}

/// A turn with a token for each four bytes.
fn turn(body: &Value, cached: u32, at: u64) -> Turn {
    let outline = Outline::read(Endpoint::Chat, body.to_string().as_bytes()).unwrap();
    let prompt = u32::try_from(outline.bytes / 4).unwrap();
    let (begin, end) = (Micros(at), Micros(at + 10));
    let (node, namespace, engine) = ("a".to_owned(), "n".to_owned(), "e".to_owned());
    Turn { outline, session: None, node, namespace, engine, begin, end, prompt, cached }
}

fn first() -> Vec<Value> {
    vec![user(&long("question")), assistant(&long("answer")), user(&long("more")), assistant(&long("again"))]
}

/// What is said of a second turn without a hit, after [`first`] and one more question.
fn second(change: impl Fn(&mut Value)) -> Option<Miss> {
    let mut conversations = Conversations::default();
    assert_eq!(conversations.add(turn(&body(&first()), 0, 0), GRAIN), None, "nothing was before");
    let mut next = body(&[first(), vec![user("and now?")]].concat());
    change(&mut next);
    // What is the same is there.
    let now = turn(&next, 0, 100);
    let before = turn(&body(&first()), 0, 0);
    let shared = Shared::of(&before.outline, &now.outline);
    let cached = if shared.parts == before.outline.parts.len() { 0 } else { (shared.bytes / 4) as u32 };
    conversations.add(Turn { cached, ..now }, GRAIN)
}

fn cause(change: impl Fn(&mut Value)) -> Cause {
    let miss = second(change).expect("a miss");
    assert!(miss.tokens > 100, "{miss:?}");
    miss.cause
}

#[test]
fn what_the_client_changed_is_named() {
    let system = |body: &mut Value, from: &str, to: &str| {
        let text = body["messages"][0]["content"].as_str().unwrap().replace(from, to);
        body["messages"][0]["content"] = text.into();
    };
    assert_eq!(cause(|body| body["reasoning_effort"] = "high".into()), Cause::OptionsChanged);
    assert_eq!(cause(|body| body["tools"].as_array_mut().unwrap().reverse()), Cause::ToolsReordered);
    assert_eq!(cause(|body| body["tools"][1]["name"] = "edit".into()), Cause::ToolsChanged);
    assert_eq!(cause(|body| drop(body.as_object_mut().unwrap().remove("tools"))), Cause::ToolsChanged);
    assert_eq!(cause(|body| system(body, "Tuesday", "Wednesday")), Cause::TextVaries);
    assert_eq!(cause(|body| system(body, "rule", "other rule")), Cause::TextVaries, "one line of five");
    assert_eq!(cause(|body| body["messages"][0]["content"] = long("new").into()), Cause::SystemChanged);
    let strip = |body: &mut Value| {
        for turn in body["messages"].as_array_mut().unwrap() {
            turn.as_object_mut().unwrap().remove("reasoning");
        }
    };
    assert_eq!(cause(strip), Cause::ReasoningDropped);
    assert_eq!(cause(|body| body["messages"][2]["content"] = "edited".into()), Cause::TurnEdited);
    let trim = |body: &mut Value| {
        let turns = body["messages"].as_array_mut().unwrap();
        turns.drain(2..4);
    };
    assert_eq!(cause(trim), Cause::TurnsRemoved);
}

#[test]
fn a_number_that_varies_is_told_from_a_text_that_is_another() {
    let with = |text: &str| {
        let mut body = body(&first());
        body["messages"][1]["content"] = format!("{} at {text}", long("question")).into();
        body
    };
    let mut conversations = Conversations::default();
    let named = |body: &Value, cached, at| Turn { session: Some(7), ..turn(body, cached, at) };
    conversations.add(named(&with("10:22"), 0, 0), GRAIN);
    let cached = 600;
    let miss = conversations.add(named(&with("11:03"), cached, 100), GRAIN).unwrap();
    assert_eq!(miss.cause, Cause::TextVaries);
    assert!(miss.why.starts_with("turn 1 (the user's)"), "{}", miss.why);
    assert!(miss.advice.contains("newest turn"), "{}", miss.advice);
}

#[test]
fn a_summary_in_place_of_the_conversation_is_compaction() {
    let mut conversations = Conversations::default();
    let many: Vec<Value> = (0..80).map(|n| user(&long(&format!("q{n}")))).collect();
    let named = |body: &Value, cached| Turn { session: Some(7), ..turn(body, cached, 0) };
    conversations.add(named(&body(&many), 0), GRAIN);
    let after = named(&body(&[user(&long("a summary"))]), 500);
    assert_eq!(conversations.add(after.clone(), GRAIN).unwrap().cause, Cause::Compacted);
    let mut unnamed = Conversations::default();
    unnamed.add(turn(&body(&many), 0, 0), GRAIN);
    assert_eq!(unnamed.add(Turn { session: None, ..after }, GRAIN), None, "it may be another conversation");
}

#[test]
fn what_the_cache_lost_is_named() {
    let next = body(&[first(), vec![user("and now?")]].concat());
    let said = |change: &dyn Fn(&mut Turn)| {
        let mut conversations = Conversations::default();
        conversations.add(turn(&body(&first()), 0, 0), GRAIN);
        let mut now = turn(&next, 0, 100);
        change(&mut now);
        conversations.add(now, GRAIN).map(|miss| (miss.cause, miss.tokens))
    };
    let before = turn(&body(&first()), 0, 0).prompt;
    assert_eq!(said(&|_| {}), Some((Cause::Gone, before)));
    assert_eq!(said(&|now| now.engine = "f".into()), Some((Cause::EngineRestarted, before)));
    assert_eq!(said(&|now| now.node = "b".into()), Some((Cause::OtherBox, before)));
    assert_eq!(said(&|now| now.namespace = "o".into()), Some((Cause::NamespaceChanged, before)));
    assert_eq!(said(&|now| now.begin = Micros(5)), Some((Cause::StillRunning, before)));
    assert_eq!(said(&|now| now.cached = before - GRAIN), None, "a row that was not full");
    assert_eq!(said(&|now| now.cached = before / 2).map(|(cause, _)| cause), Some(Cause::Gone));
}

#[test]
fn an_engine_that_never_hits_is_blamed_after_some_turns_and_cleared_by_a_hit() {
    let mut conversations = Conversations::default();
    let mut turns = first();
    let mut causes = Vec::new();
    for n in 0..6 {
        turns.push(user(&format!("and {n}?")));
        causes.push(conversations.add(turn(&body(&turns), 0, n * 100), GRAIN).map(|miss| miss.cause));
    }
    let (gone, never) = (Some(Cause::Gone), Some(Cause::NeverHits));
    assert_eq!(causes, [None, gone, gone, gone, never, never]);
    turns.push(user("a hit"));
    let hit = turn(&body(&turns), 0, 700);
    assert_eq!(conversations.add(Turn { cached: hit.prompt - 100, ..hit }, GRAIN), None);
    turns.push(user("gone again"));
    assert_eq!(conversations.add(turn(&body(&turns), 0, 800), GRAIN).map(|miss| miss.cause), gone);
}

#[test]
fn other_conversations_and_short_prompts_are_no_misses() {
    let mut conversations = Conversations::default();
    conversations.add(Turn { session: Some(7), ..turn(&body(&first()), 0, 0) }, GRAIN);
    let other = body(&[user(&long("elsewhere")), assistant(&long("yes"))]);
    assert_eq!(conversations.add(turn(&other, 0, 100), GRAIN), None);
    let agent = body(&[user(&long("look there")), assistant(&long("done"))]);
    let agent = Turn { session: Some(7), ..turn(&agent, 0, 100) };
    assert_eq!(conversations.add(agent, GRAIN), None, "a sub-agent");
    let short = json!({"messages": [user("hi")]});
    assert_eq!(conversations.add(turn(&short, 0, 0), GRAIN), None);
    assert_eq!(conversations.add(turn(&short, 0, 100), GRAIN), None);
    assert_eq!(conversations.kept.len(), 3, "short ones are not kept");
}

#[test]
fn memory_is_bounded_and_a_conversation_takes_one_place() {
    let mut conversations = Conversations::default();
    let mut turns = first();
    for n in 0..10 {
        turns.push(user(&format!("and {n}?")));
        conversations.add(turn(&body(&turns), 0, n), GRAIN);
    }
    assert_eq!(conversations.kept.len(), 1);
    for n in 0..2 * KEPT as u64 {
        conversations.add(turn(&body(&[user(&long(&format!("question {n}")))]), 0, n), GRAIN);
    }
    assert_eq!(conversations.kept.len(), KEPT);
    assert_eq!(
        conversations.parts,
        conversations.kept.iter().map(|turn| turn.outline.parts.len()).sum::<usize>()
    );
    let many: Vec<Value> = (0..3000).map(|n| user(&format!("{n} {}", "x".repeat(20)))).collect();
    for n in 0..64 {
        let mut own = many.clone();
        own.insert(0, user(&format!("opening {n}")));
        conversations.add(turn(&body(&own), 0, n), GRAIN);
    }
    assert!(conversations.parts <= PARTS && conversations.kept.len() < 40, "{}", conversations.kept.len());
}

#[test]
fn every_cause_has_its_label_and_its_words() {
    let labels: HashSet<&str> = Cause::ALL.iter().map(|cause| cause.label()).collect();
    assert_eq!(labels.len(), Cause::ALL.len());
    for cause in Cause::ALL {
        assert_eq!(serde_json::to_value(cause).unwrap(), cause.label());
        assert!(!cause.why().is_empty() && !cause.advice().is_empty());
    }
    assert!(
        Cause::TurnEdited.is_clients() && !Cause::NamespaceChanged.is_clients() && !Cause::Gone.is_clients()
    );
}
