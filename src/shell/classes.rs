//! The class of a request, as it is counted.

use super::host;
use crate::classes::{Class, ClassConfig, Label, Names};
use std::cell::RefCell;

thread_local! {
    /// A VM's, whatever the configuration: Envoy keeps the series of an old one's names.
    static NAMES: RefCell<Names> = RefCell::default();
}

/// The label of the request whose callback this is.
pub fn label(config: &ClassConfig, class: Class) -> Label {
    let Some(header) = &config.header else { return Label::Shape(class) };
    let value = host::request_header(header);
    let label = |names: &RefCell<Names>| {
        Some(names.try_borrow_mut().ok()?.label(config, value.as_deref(), class))
    };
    NAMES.with(label).unwrap_or(Label::Other)
}
