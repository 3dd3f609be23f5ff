//! Which of the configurations in one VM speaks for what.
//!
//! While Envoy replaces a configuration, and where two listeners have one each, several root
//! contexts live in one VM. They share statics, so they can agree without shared data: for each
//! thing that only one may do, it is the newest that has to do with it.

/// A VM's root contexts, oldest first.
#[derive(Debug, Default)]
pub struct Roots {
    last: u64,
    roots: Vec<Root>,
}

#[derive(Debug)]
struct Root {
    number: u64,
    clusters: Vec<String>,
}

impl Roots {
    /// A root that begins, with the clusters it names. Returns its number.
    pub fn add(&mut self, clusters: Vec<String>) -> u64 {
        self.last += 1;
        self.roots.push(Root { number: self.last, clusters });
        self.last
    }

    /// A root that ends.
    pub fn remove(&mut self, number: u64) {
        self.roots.retain(|root| root.number != number);
    }

    /// Whether this root speaks for the VM.
    pub fn is_newest(&self, number: u64) -> bool {
        self.newest(number, |_| true)
    }

    /// Whether this root speaks for a cluster.
    pub fn speaks_for(&self, number: u64, cluster: &str) -> bool {
        self.newest(number, |root| root.names(cluster))
    }

    /// Whether any root has to do with a cluster.
    pub fn is_named(&self, cluster: &str) -> bool {
        self.roots.iter().any(|root| root.names(cluster))
    }

    fn newest(&self, number: u64, of: impl Fn(&Root) -> bool) -> bool {
        self.roots.iter().rev().find(|root| of(root)).is_some_and(|root| root.number == number)
    }
}

impl Root {
    fn names(&self, cluster: &str) -> bool {
        self.clusters.iter().any(|name| name == cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clusters(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_newest_that_has_to_do_with_it_speaks() {
        let mut roots = Roots::default();
        let old = roots.add(clusters(&["a", "b"]));
        let new = roots.add(clusters(&["b", "c"]));
        assert!(roots.speaks_for(old, "a") && !roots.speaks_for(new, "a"));
        assert!(roots.speaks_for(new, "b") && !roots.speaks_for(old, "b"));
        assert!(roots.is_newest(new) && !roots.is_newest(old));
    }

    #[test]
    fn what_nobody_names_is_forgotten() {
        let mut roots = Roots::default();
        let old = roots.add(clusters(&["a", "b"]));
        roots.add(clusters(&["b"]));
        roots.remove(old);
        assert!(!roots.is_named("a") && roots.is_named("b"));
        assert!(!roots.speaks_for(old, "b"));
    }
}
