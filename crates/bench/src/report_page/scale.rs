//! Logarithmic scales: where a value lies on an axis, and which values get a line across the chart.

/// An axis from one positive value to a larger one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogScale {
    low: f64,
    high: f64,
}

impl LogScale {
    /// The scale that holds all of the values that are positive, from one power of `base` to
    /// another; `least` such steps at least.
    pub fn over(values: impl IntoIterator<Item = f64>, base: f64, steps_min: i32) -> Option<Self> {
        let (mut low, mut high) = (f64::INFINITY, 0.0_f64);
        for value in values.into_iter().filter(|value| value.is_finite() && *value > 0.0) {
            (low, high) = (low.min(value), high.max(value));
        }
        if high == 0.0 {
            return None;
        }
        // A value that is a power itself must not need another step because of rounding.
        let first = (low.log(base) + 1e-9).floor() as i32;
        let last = ((high.log(base) - 1e-9).ceil() as i32).max(first + steps_min);
        Some(Self { low: base.powi(first), high: base.powi(last) })
    }

    /// The share of the axis below a value, in per cent; values outside lie on the ends.
    pub fn percent(&self, value: f64) -> f64 {
        if value <= 0.0 {
            return 0.0;
        }
        ((value / self.low).ln() / (self.high / self.low).ln() * 100.0).clamp(0.0, 100.0)
    }

    /// The powers of `base` on the axis, at most `count_max` of them, evenly spaced.
    pub fn ticks(&self, base: f64, count_max: usize) -> Vec<f64> {
        let (first, last) = (self.low.log(base).round() as i32, self.high.log(base).round() as i32);
        let step = ((last - first) as usize).div_ceil(count_max.saturating_sub(1).max(1)).max(1);
        // Through 1, where it is on the axis.
        (first..=last)
            .filter(|power| power.rem_euclid(step as i32) == 0)
            .map(|power| base.powi(power))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lie_where_their_logarithm_says() {
        let scale = LogScale::over([0.3, 3.0, 0.0, f64::NAN], 2.0, 1).unwrap();
        assert_eq!(scale.ticks(2.0, 9), [0.25, 0.5, 1.0, 2.0, 4.0]);
        assert_eq!(
            [0.25, 1.0, 4.0, 99.0, 0.0].map(|value| scale.percent(value)),
            [0.0, 50.0, 100.0, 100.0, 0.0]
        );
        assert_eq!(LogScale::over([1.0, 4.0], 2.0, 1), Some(LogScale { low: 1.0, high: 4.0 }));
        assert_eq!(LogScale::over([], 2.0, 1), None);
    }

    #[test]
    fn equal_values_have_a_scale_and_long_axes_few_ticks() {
        assert_eq!(LogScale::over([10.0], 10.0, 1), Some(LogScale { low: 10.0, high: 100.0 }));
        let scale = LogScale::over([1.0 / 64.0, 64.0], 2.0, 1).unwrap();
        assert_eq!(scale.ticks(2.0, 5), [1.0 / 64.0, 0.125, 1.0, 8.0, 64.0]);
    }
}
