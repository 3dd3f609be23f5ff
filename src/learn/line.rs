//! A straight line through scattered points, which some that are far off do not bend.
//!
//! Tukey's resistant line: the medians of the left and of the right third give the slope, the
//! median of what is left gives the base. Least squares would follow the one request in twenty
//! that met a full queue; here up to a sixth of all points may be anywhere.

/// `y = base + slope * x`
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// Where `x` is 0.
    pub base: f64,
    /// What one more of `x` adds.
    pub slope: f64,
}

impl Line {
    /// The line through these points, which are put in order of `x`, with a share of `q` of them under it: a half, or
    /// less where only what is above is noise. `None` while there are fewer than three, or the thirds' medians are not
    /// `spread` apart: then the noise of `y` would be divided by next to nothing.
    pub fn through(points: &mut [(f64, f64)], spread: f64, q: f64) -> Option<Self> {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let third = points.len() / 3;
        let (left, rest) = points.split_at_checked(third)?;
        let (_, right) = rest.split_at_checked(rest.len().checked_sub(third)?)?;
        let middle = |points: &[(f64, f64)]| {
            let x = median(points.iter().map(|point| point.0))?;
            Some((x, quantile(points.iter().map(|point| point.1), q)?))
        };
        let ((x0, y0), (x1, y1)) = (middle(left)?, middle(right)?);
        if x1 - x0 < spread || x1 <= x0 {
            return None;
        }
        let slope = (y1 - y0) / (x1 - x0);
        let base = quantile(points.iter().map(|(x, y)| y - slope * x), q)?;
        Some(Self { base, slope })
    }

    /// The line's value.
    pub fn at(&self, x: f64) -> f64 {
        self.base + self.slope * x
    }
}

/// The value in the middle, of an even number the lower one.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    quantile(values, 0.5)
}

/// The value that a share of `q` is not above.
fn quantile(values: impl Iterator<Item = f64>, q: f64) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    let place = (values.len().checked_sub(1)? as f64 * q.clamp(0.0, 1.0)) as usize;
    let (_, found, _) = values.select_nth_unstable_by(place, f64::total_cmp);
    Some(*found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(points: &[(f64, f64)], spread: f64, expected: Option<(f64, f64)>) {
        let line = Line::through(&mut points.to_vec(), spread, 0.5);
        let found = line.map(|line| ((line.base * 1e6).round(), (line.slope * 1e6).round()));
        assert_eq!(found, expected.map(|(base, slope)| (base * 1e6, slope * 1e6)));
    }

    #[test]
    fn points_on_a_line_give_that_line_in_any_order() {
        check(&[(3.0, 7.0), (1.0, 3.0), (2.0, 5.0), (9.0, 19.0)], 1.0, Some((1.0, 2.0)));
    }

    #[test]
    fn some_that_are_far_off_do_not_bend_it() {
        let mut points: Vec<(f64, f64)> =
            (0..24).map(|n| (f64::from(n), 1.0 + 0.5 * f64::from(n))).collect();
        points[2].1 = 1000.0;
        points[23].1 = 0.0;
        points[12].1 = 1e9;
        let line = Line::through(&mut points, 1.0, 0.5).unwrap();
        assert!((line.base - 1.0).abs() < 1.0 && (line.slope - 0.5).abs() < 0.1, "{line:?}");
    }

    #[test]
    fn points_that_stand_at_one_place_give_none() {
        check(&[], 0.0, None);
        check(&[(1.0, 1.0), (2.0, 1.0)], 0.0, None);
        check(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], 0.0, None);
        check(&[(1.0, 1.0), (1.5, 2.0), (2.0, 3.0)], 2.0, None);
    }
}
