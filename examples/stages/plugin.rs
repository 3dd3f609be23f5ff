//! Runs the cases of `stages.rs` in Envoy's VM, for `scripts/bench.sh stages`: one case a tick, each in one callback.
//!
//! The configuration is the path of a prepared file, which Envoy itself serves, and the one stage to run, if it is to be
//! only one.
#![cfg(target_family = "wasm")]
#![expect(missing_docs, reason = "a plugin has no documented items")]
#![expect(clippy::disallowed_methods, reason = "what takes how long is measured by the clock")]

mod stages;
#[path = "../traffic/text.rs"]
mod text;

use log::warn;
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, RootContext};
use proxy_wasm::types::{BufferType, LogLevel};
use stages::{Case, Figure, Parts};
use std::time::Duration;

proxy_wasm::main! {{
    proxy_wasm::set_log_level(LogLevel::Warn);
    proxy_wasm::set_root_context(|_| Box::new(Bench::default()));
}}

#[derive(Default)]
struct Bench {
    path: String,
    only: Option<String>,
    ticks: u32,
    cases: Option<std::vec::IntoIter<Case>>,
}

impl Context for Bench {
    fn on_http_call_response(&mut self, _: u32, _: usize, size: usize, _: usize) {
        let body = hostcalls::get_buffer(BufferType::HttpCallResponseBody, 0, size);
        match Parts::load(body.ok().flatten().unwrap_or_default()) {
            Ok(parts) => self.cases = Some(parts.cases(self.only.as_deref()).into_iter()),
            Err(error) => warn!("bench failed: {error}"),
        }
    }
}

impl RootContext for Bench {
    fn on_configure(&mut self, size: usize) -> bool {
        let path = hostcalls::get_buffer(BufferType::PluginConfiguration, 0, size);
        let text = String::from_utf8(path.ok().flatten().unwrap_or_default()).unwrap_or_default();
        let mut words = text.split_whitespace().map(str::to_owned);
        self.path = words.next().unwrap_or_default();
        self.only = words.next();
        hostcalls::set_tick_period(Duration::from_millis(50)).is_ok()
    }

    fn on_tick(&mut self) {
        self.ticks += 1;
        // The listener that serves the file starts after the plugin.
        if self.ticks == 20 {
            let headers =
                vec![(":method", "GET"), (":path", self.path.as_str()), (":authority", "files")];
            let timeout = Duration::from_secs(60);
            if hostcalls::dispatch_http_call("files", headers, None, vec![], timeout).is_err() {
                warn!("bench failed: no call");
            }
        }
        let Some(cases) = &mut self.cases else { return };
        match cases.next() {
            Some(case) => {
                let Figure { stage, input, us, longest_us } = case.run();
                warn!("bench stage={stage} us={us:.2} longest_us={longest_us:.2} input={input}");
            }
            None => {
                warn!("bench end");
                self.cases = None;
            }
        }
    }
}
