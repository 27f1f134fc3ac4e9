//! Figures of a run that was divided into short intervals: what most intervals reach, or stay
//! below.
use crate::report::Figure;

/// Ranks `percent` of sorted values, and says how many of the others are before it.
fn before(count: usize, percent: usize) -> usize {
    (count * percent).div_ceil(100).saturating_sub(1)
}

/// The least of the sorted values that `percent` per cent of them don't exceed; zero of none.
pub(crate) fn quantile(sorted: &[f64], percent: usize) -> f64 {
    sorted.get(before(sorted.len(), percent)).copied().unwrap_or(0.0)
}

/// The greatest of the sorted values that `percent` per cent of them reach; zero of none.
pub(crate) fn reached_by(sorted: &[f64], percent: usize) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    sorted[last - before(sorted.len(), percent)]
}

/// The name of the figure that `$percent` per cent of the intervals reach.
macro_rules! rate_name {
    ($percent:literal) => {
        concat!("rate that ", $percent, " % of the intervals reach")
    };
}

pub(crate) const RATE_50: &str = rate_name!("50");
pub(crate) const RATE_90: &str = rate_name!("90");
pub(crate) const RATE_99: &str = rate_name!("99");

/// How slow the slower intervals are; nothing without intervals.
pub(crate) fn rate_figures(rates: &[f64], unit: &str) -> Vec<Figure> {
    if rates.is_empty() {
        return Vec::new();
    }
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    [(RATE_50, 50), (RATE_90, 90), (RATE_99, 99)]
        .map(|(name, percent)| Figure::new(name, reached_by(&sorted, percent), unit))
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_have_so_many_values_on_their_side() {
        let sorted: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(
            [0, 1, 50, 99, 100].map(|percent| quantile(&sorted, percent)),
            [1.0, 1.0, 50.0, 99.0, 100.0]
        );
        assert_eq!(
            [0, 1, 50, 99, 100].map(|percent| reached_by(&sorted, percent)),
            [100.0, 100.0, 51.0, 2.0, 1.0]
        );
        assert_eq!((quantile(&[], 99), reached_by(&[], 99)), (0.0, 0.0));
        assert_eq!((quantile(&[7.0], 1), reached_by(&[7.0], 99)), (7.0, 7.0));
    }

    #[test]
    fn rates_point_to_the_slow_intervals() {
        let rates: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let figures = rate_figures(&rates, "files/s");
        let values: Vec<f64> = figures.iter().map(|figure| figure.value).collect();
        assert_eq!(values, [51.0, 11.0, 2.0]);
        assert_eq!(figures[2].name, "rate that 99 % of the intervals reach");
        assert_eq!(rate_figures(&[], "files/s"), []);
    }
}
