//! Envoy's statistics, read back.

use std::collections::BTreeMap;

/// One scrape of `/stats/prometheus`.
pub struct Scrape {
    samples: Vec<Sample>,
}

struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Scrape {
    /// Reads the exposition format as Envoy writes it.
    pub fn parse(page: &str) -> Self {
        let lines = page.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        Self { samples: lines.filter_map(sample).collect() }
    }

    /// The sum of a metric over all series that have these labels; 0 when there is none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).map(|sample| sample.value).sum()
    }

    /// How many series have these labels.
    pub fn count(&self, name: &str, labels: &[(&str, &str)]) -> usize {
        self.matching(name, labels).count()
    }

    /// A metric's series, by the value of one label; those at 0 are left out.
    pub fn by(&self, name: &str, label: &str) -> BTreeMap<String, u64> {
        let mut found = BTreeMap::new();
        for sample in self.matching(name, &[]).filter(|sample| sample.value != 0.0) {
            let value = sample.labels.get(label).cloned().unwrap_or_default();
            *found.entry(value).or_default() += sample.value as u64;
        }
        found
    }

    fn matching<'a>(
        &'a self,
        name: &'a str,
        labels: &'a [(&'a str, &'a str)],
    ) -> impl Iterator<Item = &'a Sample> {
        self.samples.iter().filter(move |sample| {
            let has =
                |(name, value): &(&str, &str)| sample.labels.get(*name).is_some_and(|v| v == value);
            sample.name == name && labels.iter().all(has)
        })
    }
}

fn sample(line: &str) -> Option<Sample> {
    let (series, value) = line.rsplit_once(' ')?;
    let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
    let labels = labels.strip_suffix('}')?.split("\",").filter_map(|label| {
        let (name, value) = label.split_once("=\"")?;
        Some((name.to_owned(), value.trim_end_matches('"').to_owned()))
    });
    Some(Sample { name: name.to_owned(), labels: labels.collect(), value: value.parse().ok()? })
}

/// The reasons counted between two scrapes, with how often.
pub fn reasons_between(before: &Scrape, after: &Scrape) -> BTreeMap<String, u64> {
    let earlier = before.by("warmpath_requests_total", "reason");
    let mut later = after.by("warmpath_requests_total", "reason");
    for (reason, count) in &mut later {
        *count -= earlier.get(reason).copied().unwrap_or(0);
    }
    later.retain(|_, count| *count > 0);
    later
}

#[test]
fn a_scrape_is_read_by_name_and_label() {
    let page = "# TYPE a gauge\na{x=\"1\",y=\"b:c, d\"} 2\na{x=\"2\"} 3\nab 5\n\n";
    let scrape = Scrape::parse(page);
    assert_eq!(scrape.sum("a", &[]), 5.0);
    assert_eq!(scrape.sum("a", &[("x", "1"), ("y", "b:c, d")]), 2.0);
    assert_eq!((scrape.sum("ab", &[]), scrape.count("a", &[("x", "3")])), (5.0, 0));
    assert_eq!(
        scrape.by("a", "x").into_iter().collect::<Vec<_>>(),
        [("1".into(), 2), ("2".into(), 3)]
    );
}
