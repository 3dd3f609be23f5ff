//! From the least to the most of a signal over the replicas: how peers make a score of a count.

/// See the module.
#[derive(Clone, Copy)]
pub struct Span {
    least: f64,
    most: f64,
}

impl Span {
    /// The span of these values.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let wider = |(least, most): (f64, f64), value: f64| (least.min(value), most.max(value));
        let (least, most) = values.fold((f64::INFINITY, f64::NEG_INFINITY), wider);
        Self { least, most }
    }

    /// 1 for the least, 0 for the most, and 1 for everybody where all are equal.
    pub fn lowness(self, value: f64) -> f64 {
        if self.most > self.least { (self.most - value) / (self.most - self.least) } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_has_all_and_the_most_nothing_however_near_they_are() {
        let span = Span::of([4.0, 2.0, 10.0].into_iter());
        assert_eq!([2.0, 4.0, 10.0].map(|value| span.lowness(value)), [1.0, 0.75, 0.0]);
        let span = Span::of([0.0, 1.0].into_iter());
        assert_eq!(span.lowness(1.0), 0.0);
        assert_eq!(Span::of([3.0, 3.0].into_iter()).lowness(3.0), 1.0);
    }
}
