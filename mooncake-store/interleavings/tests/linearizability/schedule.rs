//! Orders of threads, each drawn from a seed.

use mooncake_core::clock::Rng;
use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};

/// Rule by which the next thread is chosen.
#[derive(Clone, Copy, Debug)]
enum Rule {
    /// Any thread, each time.
    Any,
    /// The same thread, until a draw of one in so many interrupts it.
    Runs { of: u64 },
    /// The thread of the highest priority. A draw of one in so many makes the priority of the
    /// running one the lowest (probabilistic concurrency testing, Burckhardt et al. 2010).
    Priorities { of: u64 },
}

/// Scheduler of one run.
pub(crate) struct Order {
    seed: u64,
    rng: Rng,
    rule: Rule,
    priorities: Vec<(TaskId, i64)>,
    lowest: i64,
    is_over: bool,
}

impl Order {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::seeded(seed ^ 0x5c4e_d01e);
        let of = 1 << (2 + rng.below(7));
        let rule = match rng.below(4) {
            0 => Rule::Any,
            1 => Rule::Runs { of },
            _ => Rule::Priorities { of: of * 2 },
        };
        Self { seed, rng, rule, priorities: Vec::new(), lowest: 0, is_over: false }
    }

    fn lower(&mut self, task: TaskId) {
        self.lowest -= 1;
        let lowest = self.lowest;
        for (_, priority) in self.priorities.iter_mut().filter(|(other, _)| *other == task) {
            *priority = lowest;
        }
    }

    fn priority(&mut self, task: TaskId) -> i64 {
        if let Some((_, priority)) = self.priorities.iter().find(|(other, _)| *other == task) {
            return *priority;
        }
        let priority = self.rng.below(1 << 32) as i64;
        self.priorities.push((task, priority));
        priority
    }
}

impl Scheduler for Order {
    fn new_execution(&mut self) -> Option<Schedule> {
        let is_first = !std::mem::replace(&mut self.is_over, true);
        is_first.then(|| Schedule::new(self.seed))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        let ids: Vec<TaskId> = runnable.iter().map(|task| task.id()).collect();
        let running = current.filter(|task| ids.contains(task) && !is_yielding);
        match self.rule {
            Rule::Any => ids.get(self.rng.below(ids.len() as u64) as usize).copied(),
            Rule::Runs { of } => match running {
                Some(task) if self.rng.below(of) > 0 => Some(task),
                _ => ids.get(self.rng.below(ids.len() as u64) as usize).copied(),
            },
            Rule::Priorities { of } => {
                if let Some(task) = current
                    && (is_yielding || self.rng.below(of) == 0)
                {
                    self.lower(task);
                }
                ids.into_iter().max_by_key(|task| self.priority(*task))
            }
        }
    }

    fn next_u64(&mut self) -> u64 {
        self.rng.next_u64()
    }
}
