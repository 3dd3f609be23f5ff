//! The one answer that is the filter's own: 429, in the shape that errors have in the API that was asked.
//!
//! When it is given is [`crate::route`]'s part.

use crate::request::Api;
use serde_json::json;

/// Its status.
pub const STATUS: u16 = 429;

const MESSAGE: &str = "all replicas are overloaded: try again later";

/// Its body.
pub fn body(api: Api) -> String {
    let body = match api {
        Api::Messages => {
            json!({"type": "error", "error": {"type": "rate_limit_error", "message": MESSAGE}})
        }
        _ => json!({"error": {
            "message": MESSAGE,
            "type": "rate_limit_error",
            "param": null,
            "code": STATUS,
        }}),
    };
    body.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[track_caller]
    fn check(path: &str, is_anthropic: bool) {
        let body: Value = serde_json::from_str(&body(Api::of_path(path).unwrap())).unwrap();
        assert_eq!(body["error"]["type"], "rate_limit_error", "{path}");
        assert!(body["error"]["message"].is_string(), "{path}");
        let (kind, code) = (&body["type"], &body["error"]["code"]);
        assert_eq!((kind == "error", code == 429), (is_anthropic, !is_anthropic), "{path}");
    }

    #[test]
    fn an_error_has_the_shape_of_its_api() {
        check("/v1/messages", true);
        for path in ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"] {
            check(path, false);
        }
    }
}
