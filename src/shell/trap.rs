//! Traps on demand, for the tests of what a trap costs. Only the feature `trap` compiles it.
//!
//! It wraps the root and its streams, so that no line of what is shipped knows of it. A request
//! names the callback that is to trap in a header; callbacks that belong to no request do it at
//! their next turn. Nothing else differs from the filter itself.

use super::{host, root};
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, ContextType};
use std::cell::Cell;

/// Names the callback. Also what the build looks for, to be sure that it is not shipped.
const HEADER: &str = "x-warmpath-trap";

/// Tells whoever polls that the next answer is the one.
const CALL_KEY: &str = "warmpath/trap";

thread_local! {
    static NEXT_TICK: Cell<bool> = const { Cell::new(false) };
}

fn trap_if(wanted: bool) {
    if wanted {
        core::arch::wasm32::unreachable()
    }
}

/// The root context, as [`root::Root`] but for the traps.
#[derive(Default)]
pub struct Root(root::Root);

impl Context for Root {
    fn on_http_call_response(&mut self, token: u32, headers: usize, body: usize, trailers: usize) {
        if host::shared(CALL_KEY).0.is_some_and(|value| !value.is_empty()) {
            host::set_shared(CALL_KEY, b"", None);
            trap_if(true);
        }
        self.0.on_http_call_response(token, headers, body, trailers);
    }
}

impl RootContext for Root {
    fn on_vm_start(&mut self, size: usize) -> bool {
        self.0.on_vm_start(size)
    }

    fn on_configure(&mut self, size: usize) -> bool {
        self.0.on_configure(size)
    }

    fn on_tick(&mut self) {
        trap_if(NEXT_TICK.take());
        self.0.on_tick();
    }

    fn create_http_context(&self, id: u32) -> Option<Box<dyn HttpContext>> {
        let stream = self.0.create_http_context(id)?;
        Some(Box::new(Stream { stream, wish: Vec::new() }))
    }

    fn get_type(&self) -> Option<ContextType> {
        self.0.get_type()
    }
}

struct Stream {
    stream: Box<dyn HttpContext>,
    wish: Vec<u8>,
}

impl Stream {
    fn at(&self, callback: &str) {
        trap_if(self.wish == callback.as_bytes());
    }
}

impl Context for Stream {}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, count: usize, end_of_stream: bool) -> Action {
        self.wish = host::request_header(HEADER).unwrap_or_default();
        if self.wish == b"call" {
            host::set_shared(CALL_KEY, b"next", None);
        }
        self.at("request_headers");
        self.stream.on_http_request_headers(count, end_of_stream)
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        self.at("request_body");
        self.stream.on_http_request_body(size, end_of_stream)
    }

    fn on_http_request_trailers(&mut self, count: usize) -> Action {
        self.stream.on_http_request_trailers(count)
    }

    fn on_http_response_headers(&mut self, count: usize, end_of_stream: bool) -> Action {
        self.at("response_headers");
        self.stream.on_http_response_headers(count, end_of_stream)
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        self.at("response_body");
        self.stream.on_http_response_body(size, end_of_stream)
    }

    fn on_log(&mut self) {
        self.at("log");
        // Not before, or the tick could come while the request that asks is in flight, and cut it.
        NEXT_TICK.set(NEXT_TICK.get() || self.wish == b"tick");
        self.stream.on_log();
    }
}
