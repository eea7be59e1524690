//! Metric families of the crate `prometheus`, built from counters when a registry asks for them.

use std::collections::HashMap;

use mooncake_core::{Error, Result};
use mooncake_transport::admission::{ByteBudget, listeners};
use prometheus::TextEncoder;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram as HistogramValue, LabelPair, Metric, MetricFamily, MetricType,
};

use super::Histogram;
use crate::message::{DISPLAY_VERSION, MASTER_VERSION};

/// Name and value of a label.
pub type Label<'a> = (&'a str, &'a str);

/// Labels of a metric without labels of its own.
const NONE: [Label<'static>; 0] = [];

/// Metric families that are being built.
#[derive(Default)]
pub struct Families {
    families: Vec<MetricFamily>,
    /// Labels of every metric that is added.
    common: Vec<LabelPair>,
}

impl Families {
    /// Adds a label to all metrics that are added later.
    pub fn label(&mut self, name: &str, value: &str) {
        self.common.extend(pairs(&[(name, value)]));
    }

    /// Adds a counter without labels.
    pub fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.counters(name, help, [(NONE, value)]);
    }

    /// Adds a gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.gauges(name, help, [(NONE, value)]);
    }

    /// Adds a histogram without labels. `unit` recorded values make one reported unit.
    pub fn histogram<const N: usize>(&mut self, name: &str, help: &str, unit: f64, one: &Histogram<N>) {
        self.histograms(name, help, unit, [(NONE, one)]);
    }

    /// Adds counters of one name, by label.
    pub fn counters<'a, L: AsRef<[Label<'a>]>>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) {
        self.add(name, help, MetricType::COUNTER, values, |metric, value| {
            let mut counter = Counter::default();
            counter.set_value(value as f64);
            metric.set_counter(counter);
        });
    }

    /// Adds gauges of one name, by label.
    pub fn gauges<'a, L: AsRef<[Label<'a>]>>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) {
        self.add(name, help, MetricType::GAUGE, values, |metric, value| {
            let mut gauge = Gauge::default();
            gauge.set_value(value as f64);
            metric.set_gauge(gauge);
        });
    }

    /// Adds histograms of one name, by label. `unit` recorded values make one reported unit.
    pub fn histograms<'a, 'h, L: AsRef<[Label<'a>]>, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        unit: f64,
        all: impl IntoIterator<Item = (L, &'h Histogram<N>)>,
    ) {
        let all = all.into_iter().map(|(labels, one)| {
            let buckets = one.below().map(|(bound, count)| (bound as f64 / unit, count)).collect();
            (labels, (buckets, one.count(), one.sum() as f64 / unit))
        });
        self.add(name, help, MetricType::HISTOGRAM, all, set_histogram);
    }

    /// Adds a histogram from cumulative buckets: upper bound and number of values at or below it.
    pub fn buckets(&mut self, name: &str, help: &str, buckets: Vec<(f64, u64)>, count: u64, sum: f64) {
        self.add(name, help, MetricType::HISTOGRAM, [(NONE, (buckets, count, sum))], set_histogram);
    }

    /// Adds the versions of the protocol and of this program.
    pub fn build_info(&mut self) {
        let labels = [("display_version", DISPLAY_VERSION), ("version", MASTER_VERSION)];
        let help = "Version of the RPC protocol and of the program, always 1";
        self.gauges("mooncake_build_info", help, [(labels, 1)]);
    }

    /// Adds the memory of this process as the kernel counts it, where there is `/proc`.
    pub fn process_memory(&mut self) {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        for (field, name, help) in [
            ("VmRSS", "rss", "Resident memory of the process in bytes"),
            ("VmHWM", "rss_peak", "Largest resident memory of the process so far, in bytes"),
            ("RssAnon", "rss_anon", "Resident anonymous memory of the process in bytes"),
            ("RssFile", "rss_file", "Resident memory of files mapped by the process, in bytes"),
            ("RssShmem", "rss_shmem", "Resident shared memory of the process in bytes"),
            ("VmSize", "vsize", "Address space of the process in bytes"),
            ("VmSwap", "swap", "Swapped-out memory of the process in bytes"),
        ] {
            if let Some(bytes) = status_bytes(&status, field) {
                self.gauge(&format!("mooncake_process_{name}_bytes"), help, bytes);
            }
        }
    }

    /// Adds the connections of every listener of this process, under names with this prefix.
    pub fn connections(&mut self, prefix: &str) {
        let listeners = listeners();
        let open = listeners.iter().map(|at| ([("listener", at.listener)], at.open));
        self.gauges(&format!("{prefix}_connections"), "Connections that are open at a listener", open);
        let refused = listeners.iter().flat_map(|at| {
            at.refused().map(|(reason, count)| ([("listener", at.listener), ("reason", reason)], count))
        });
        let help = "Connections that were refused or closed by a listener, by reason";
        self.counters(&format!("{prefix}_connections_refused_total"), help, refused);
        let bytes = ByteBudget::of_process().report();
        let help = "Bytes of incomplete requests and unread responses";
        self.gauge(&format!("{prefix}_connection_bytes"), help, bytes.held);
        let help = "Limit of the bytes of incomplete requests and unread responses";
        self.gauge(&format!("{prefix}_connection_bytes_limit"), help, bytes.limit);
        let help = "Connections that were closed because these bytes exceeded their limit";
        self.counter(&format!("{prefix}_connections_closed_for_bytes_total"), help, bytes.closed);
    }

    fn add<'a, L: AsRef<[Label<'a>]>, V>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        values: impl IntoIterator<Item = (L, V)>,
        set: impl Fn(&mut Metric, V),
    ) {
        let metric = |(labels, value): (L, V)| {
            let mut metric = Metric::default();
            metric.set_label(self.common.iter().cloned().chain(pairs(labels.as_ref())).collect());
            set(&mut metric, value);
            metric
        };
        let metrics: Vec<Metric> = values.into_iter().map(metric).collect();
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

/// Returns the value of a field of `/proc/self/status`, which the kernel states in kB.
fn status_bytes(status: &str, field: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn pairs(labels: &[Label<'_>]) -> impl Iterator<Item = LabelPair> {
    labels.iter().map(|(name, value)| {
        let mut label = LabelPair::default();
        label.set_name((*name).into());
        label.set_value((*value).into());
        label
    })
}

fn set_histogram(metric: &mut Metric, (buckets, count, sum): (Vec<(f64, u64)>, u64, f64)) {
    let bucket = |(bound, count)| {
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(bound);
        bucket.set_cumulative_count(count);
        bucket
    };
    let mut histogram = HistogramValue::default();
    histogram.set_bucket(buckets.into_iter().map(bucket).collect());
    histogram.set_sample_count(count);
    histogram.set_sample_sum(sum);
    metric.set_histogram(histogram);
}

/// Collector that calls a function for its metrics.
struct FamilyCollector<F> {
    identity: Option<Desc>,
    fill: F,
}

impl<F: Fn(&mut Families) + Send + Sync> Collector for FamilyCollector<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.identity.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut families = Families::default();
        (self.fill)(&mut families);
        families.families
    }
}

/// Returns a collector of the metrics that `fill` adds. A registry refuses a second collector of
/// the same subject and instance. `subject` has the form of the name of a metric.
pub fn collector<F: Fn(&mut Families) + Send + Sync>(
    subject: &str,
    instance: &str,
    fill: F,
) -> impl Collector + use<F> {
    let labels = HashMap::from([("instance".into(), instance.into())]);
    FamilyCollector { identity: Desc::new(subject.into(), subject.into(), Vec::new(), labels).ok(), fill }
}

/// Returns the metrics of a collector in the text format of Prometheus.
pub fn text(collector: &dyn Collector) -> Result<String> {
    let text = TextEncoder::new().encode_to_string(&collector.collect());
    text.map_err(|error| Error::internal("cannot encode metrics").with_source(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_from_the_status_of_the_process() {
        let status = "Name:\tmooncake\nVmPeak:\t  9 kB\nVmRSS:\t   35344 kB\nVmSwap:\t 0 kB\nThreads:\t3\n";
        assert_eq!(status_bytes(status, "VmRSS"), Some(35344 * 1024));
        assert_eq!(status_bytes(status, "VmSwap"), Some(0));
        for absent in ["VmHWM", "Vm", "Threads", "Name"] {
            assert_eq!(status_bytes(status, absent), None);
        }
        assert_eq!(status_bytes("VmRSS: 18446744073709551615 kB", "VmRSS"), None);
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn a_process_has_memory() {
        let page = text(&collector("memory", "", Families::process_memory)).unwrap();
        for name in ["rss", "rss_peak", "rss_anon", "rss_file", "rss_shmem", "vsize", "swap"] {
            let line =
                page.lines().find_map(|it| it.strip_prefix(&format!("mooncake_process_{name}_bytes ")));
            let bytes: f64 = line.unwrap_or_else(|| panic!("{name} in {page}")).parse().unwrap();
            assert!(bytes > 0.0 || ["swap", "rss_shmem"].contains(&name), "{name} is {bytes}");
        }
    }
}
