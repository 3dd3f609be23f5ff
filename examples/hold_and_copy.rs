//! What any filter pays that reads a request's body: it holds the body, copies it into its VM, and lets it go; answers it
//! copies in passing. Nothing is done with what was copied.
//!
//! `scripts/bench.sh requests` compares Warmpath with it.
#![cfg(target_family = "wasm")]
#![expect(missing_docs, reason = "a plugin has no documented items")]

use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, BufferType, ContextType, LogLevel, MetricType};

proxy_wasm::main! {{
    proxy_wasm::set_log_level(LogLevel::Warn);
    proxy_wasm::set_root_context(|_| Box::new(Root::default()));
}}

#[derive(Default)]
struct Root {
    copied: Option<u32>,
}

/// One request.
struct Stream {
    copied: Option<u32>,
}

impl Context for Root {}

impl RootContext for Root {
    fn on_configure(&mut self, _size: usize) -> bool {
        self.copied =
            hostcalls::define_metric(MetricType::Counter, "hold_and_copy_bytes_total").ok();
        self.copied.is_some()
    }

    fn create_http_context(&self, _context_id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Stream { copied: self.copied }))
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

impl Context for Stream {}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, _num_headers: usize, end_of_stream: bool) -> Action {
        if end_of_stream { Action::Continue } else { Action::Pause }
    }

    fn on_http_request_body(&mut self, body_size: usize, end_of_stream: bool) -> Action {
        if !end_of_stream {
            return Action::Pause;
        }
        let copied = copy(BufferType::HttpRequestBody, body_size);
        if let (Some(metric), Ok(copied)) = (self.copied, i64::try_from(copied)) {
            let _counted = hostcalls::increment_metric(metric, copied);
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, body_size: usize, _end_of_stream: bool) -> Action {
        copy(BufferType::HttpResponseBody, body_size);
        Action::Continue
    }
}

fn copy(kind: BufferType, size: usize) -> usize {
    let body = hostcalls::get_buffer(kind, 0, size).ok().flatten().unwrap_or_default();
    std::hint::black_box(&body).len()
}
