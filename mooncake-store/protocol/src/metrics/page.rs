//! Metrics in the text format of Prometheus.

use mooncake_core::{Error, Result};
use mooncake_transport::admission::listeners;
use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram as Shown, LabelPair, Metric, MetricFamily, MetricType,
};
use prometheus::{Encoder, TextEncoder};

use super::Histogram;

/// Names and values of labels.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// A document of metrics.
#[derive(Default)]
pub struct Page {
    families: Vec<MetricFamily>,
    /// Labels of every metric that is added.
    common: Vec<LabelPair>,
}

impl Page {
    /// Adds a label to all metrics that are added later.
    pub fn label(&mut self, name: &str, value: &str) {
        self.common.extend(pairs(&[(name, value)]));
    }

    /// Returns the document as text.
    pub fn text(&self) -> Result<Vec<u8>> {
        let mut text = Vec::new();
        let encoded = TextEncoder::new().encode(&self.families, &mut text);
        encoded.map_err(|error| Error::internal("cannot encode metrics").with_source(error))?;
        Ok(text)
    }

    pub fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.counters(name, help, [(&[] as Labels<'_>, value)]);
    }

    pub fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.gauges(name, help, [(&[] as Labels<'_>, value)]);
    }

    /// Adds the connections of every listener of this process, under names with this prefix.
    pub fn connections(&mut self, prefix: &str) {
        let listeners = listeners();
        let names: Vec<[(&str, &str); 1]> = listeners.iter().map(|at| [("listener", at.listener)]).collect();
        let open = names.iter().zip(&listeners).map(|(labels, at)| (&labels[..], at.open));
        self.gauges(&format!("{prefix}_connections"), "Connections that are open at a listener", open);
        let refused: Vec<([(&str, &str); 2], u64)> = listeners
            .iter()
            .flat_map(|at| {
                at.refused().map(|(reason, count)| ([("listener", at.listener), ("reason", reason)], count))
            })
            .collect();
        let help = "Connections that were refused or closed by a listener, by reason";
        let refused = refused.iter().map(|(labels, count)| (&labels[..], *count));
        self.counters(&format!("{prefix}_connections_refused_total"), help, refused);
    }

    /// Adds counters of one name, by label.
    pub fn counters<'a>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<'a>, u64)>,
    ) {
        let metric = |value: u64| {
            let mut counter = Counter::default();
            counter.set_value(value as f64);
            let mut metric = Metric::default();
            metric.set_counter(counter);
            metric
        };
        let values = values.into_iter().map(|(labels, value)| (labels, metric(value)));
        self.family(name, help, MetricType::COUNTER, values);
    }

    /// Adds gauges of one name, by label.
    pub fn gauges<'a>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Labels<'a>, u64)>,
    ) {
        let metric = |value: u64| {
            let mut gauge = Gauge::default();
            gauge.set_value(value as f64);
            let mut metric = Metric::default();
            metric.set_gauge(gauge);
            metric
        };
        let values = values.into_iter().map(|(labels, value)| (labels, metric(value)));
        self.family(name, help, MetricType::GAUGE, values);
    }

    /// Adds histograms of one name, by label. `unit` recorded values make one reported unit.
    pub fn histograms<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        unit: f64,
        all: impl IntoIterator<Item = (Labels<'a>, &'a Histogram<N>)>,
    ) {
        let shown = |one: &Histogram<N>| {
            let below: Vec<_> = one.below().map(|(bound, count)| (bound as f64 / unit, count)).collect();
            histogram(below.into_iter(), one.count(), one.sum() as f64 / unit)
        };
        let all = all.into_iter().map(|(labels, one)| (labels, shown(one)));
        self.family(name, help, MetricType::HISTOGRAM, all);
    }

    /// Adds a histogram from cumulative buckets: upper bound and number of values at or below it.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        buckets: impl Iterator<Item = (f64, u64)>,
        count: u64,
        sum: f64,
    ) {
        let shown = histogram(buckets, count, sum);
        self.family(name, help, MetricType::HISTOGRAM, [(&[] as Labels<'_>, shown)]);
    }

    fn family<'a>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        metrics: impl IntoIterator<Item = (Labels<'a>, Metric)>,
    ) {
        let labelled = |(labels, mut metric): (Labels<'a>, Metric)| {
            metric.set_label(self.common.iter().cloned().chain(pairs(labels)).collect());
            metric
        };
        let metrics: Vec<Metric> = metrics.into_iter().map(labelled).collect();
        // The encoder rejects a family without metrics.
        if metrics.is_empty() {
            return;
        }
        let mut family = MetricFamily::default();
        family.set_name(name.into());
        family.set_help(help.into());
        family.set_field_type(kind);
        family.set_metric(metrics);
        self.families.push(family);
    }
}

fn pairs(labels: Labels<'_>) -> impl Iterator<Item = LabelPair> {
    labels.iter().map(|(name, value)| {
        let mut label = LabelPair::default();
        label.set_name((*name).into());
        label.set_value((*value).into());
        label
    })
}

fn histogram(buckets: impl Iterator<Item = (f64, u64)>, count: u64, sum: f64) -> Metric {
    let bucket = |(bound, count)| {
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(bound);
        bucket.set_cumulative_count(count);
        bucket
    };
    let mut shown = Shown::default();
    shown.set_bucket(buckets.map(bucket).collect());
    shown.set_sample_count(count);
    shown.set_sample_sum(sum);
    let mut metric = Metric::default();
    metric.set_histogram(shown);
    metric
}
