//! What has been loaded, for as long as somebody uses it.
//!
//! While one configuration of a VM replaces another, both name models, mostly the same. A model stays as long as one of
//! them holds it and not longer, or a VM would grow by some ten megabytes with every update that brings a new path. It
//! loads nothing itself.

use hashbrown::HashMap;
use std::rc::{Rc, Weak};

/// Values by the cluster and the path that they came from.
#[derive(Debug)]
pub struct Loaded<T>(HashMap<(String, String), Weak<T>>);

impl<T> Default for Loaded<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> Loaded<T> {
    /// What was loaded from there, if somebody still holds it.
    pub fn find(&self, cluster: &str, path: &str) -> Option<Rc<T>> {
        self.0.get(&(cluster.to_owned(), path.to_owned()))?.upgrade()
    }

    /// Notes what was loaded, and forgets what nobody holds any more.
    pub fn note(&mut self, cluster: &str, path: &str, value: &Rc<T>) {
        self.0.retain(|_, value| value.strong_count() > 0);
        self.0.insert((cluster.to_owned(), path.to_owned()), Rc::downgrade(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_configurations_name_is_loaded_once_and_stays_with_the_last() {
        let mut loaded = Loaded::default();
        let of_the_old = Rc::new(1);
        loaded.note("files", "/a", &of_the_old);
        let of_the_new = loaded.find("files", "/a");
        drop(of_the_old);
        assert_eq!(of_the_new.as_deref(), Some(&1));
        assert_eq!(loaded.find("files", "/b"), None);
        assert_eq!(loaded.find("others", "/a"), None);
        drop(of_the_new);
        assert_eq!(loaded.find("files", "/a"), None);
    }

    #[test]
    fn updates_without_end_leave_nothing_behind() {
        let mut loaded = Loaded::default();
        let mut current = Rc::new(0);
        for version in 0..1_000 {
            let next = Rc::new(version);
            loaded.note("files", &format!("/{version}"), &next);
            current = next;
            assert!(loaded.0.len() <= 2, "{version}");
        }
        assert_eq!(loaded.find("files", "/999").as_deref(), Some(&*current));
    }

    #[test]
    fn the_same_place_may_be_loaded_again() {
        let mut loaded = Loaded::default();
        loaded.note("files", "/a", &Rc::new(1));
        let second = Rc::new(2);
        loaded.note("files", "/a", &second);
        assert_eq!(loaded.find("files", "/a").as_deref(), Some(&2));
    }
}
