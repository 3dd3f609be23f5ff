//! What one configuration asks for that the next one does not: whose gauges nobody would move any more.
//!
//! Replicas and clusters that are no more are seen by the table; what stands in their gauges is the shell's to take back.

use super::Config;

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Left<'a> {
    /// Agents are not asked any more.
    pub cache_report: bool,
    /// Nothing is recommended any more.
    pub scaling: bool,
    /// Names under which models are not shown any more.
    pub models: Vec<&'a str>,
}

impl Config {
    /// What the next configuration leaves behind.
    pub fn left_by(&self, next: &Self) -> Left<'_> {
        let stays = |name: &&str| next.shown_models().any(|other| other == *name);
        Left {
            cache_report: self.cache_report.is_some() && next.cache_report.is_none(),
            scaling: self.scaling.is_some() && next.scaling.is_none(),
            models: self.shown_models().filter(|name| !stays(name)).collect(),
        }
    }

    /// The names by which metrics know the models.
    pub fn shown_models(&self) -> impl Iterator<Item = &str> {
        self.models.iter().filter_map(|model| model.names.first().map(String::as_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn config(models: &[&str], more: Value) -> Config {
        let models: Vec<Value> = models
            .iter()
            .map(|name| json!({"name": name, "aliases": [format!("{name}-alias")], "prepared": {"cluster": "f", "path": "/m"}}))
            .collect();
        let mut value =
            json!({"models": models, "clusters": [{"name": "c", "replicas": ["10.0.0.1:80"]}]});
        value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Config::parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn what_is_not_configured_any_more_is_left() {
        let all = || json!({"scaling": {}, "cache_report": {"cluster": "agents"}});
        let before = config(&["a", "b"], all());
        assert_eq!(before.left_by(&before), Left::default());
        let none = config(&["b", "c"], json!({}));
        let left = Left { cache_report: true, scaling: true, models: vec!["a"] };
        assert_eq!(before.left_by(&none), left);
        assert_eq!(none.left_by(&before), Left { models: vec!["c"], ..Left::default() });
        // What was an alias is shown under its own name only.
        let renamed = config(&["a-alias", "b"], all());
        assert_eq!(before.left_by(&renamed).models, ["a"]);
    }
}
