#include "engine/data/ledger/ledger_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/data/ledger/ledger_lines.h"
#include "tandem/error.h"

namespace tandem {
namespace {

int64_t finished_steps(const ConsumedStep& entry) {
  return entry.is_skip ? entry.step - 1 : entry.step;
}

/// Counts samples [0, end).
std::vector<SourceSamples> count_sources(const std::vector<SampledSource>& sources, int64_t end) {
  std::vector<double> weights;
  for (const SampledSource& source : sources) weights.push_back(source.weight);
  const BlendOrder order(weights);
  std::vector<SourceSamples> counts;
  for (size_t i = 0; i < sources.size(); ++i) {
    counts.push_back({order.count(i, end), sources[i].windows});
  }
  return counts;
}

class LedgerChecker {
 public:
  LedgerCheck check(std::string_view text, std::span<const ConsumedSamples> saved) {
    while (!text.empty()) {
      const size_t end = text.find('\n');
      ++check_.lines;
      if (end == std::string_view::npos) {
        report(
            "is incomplete: a process was stopped while it wrote it, and its step does not count");
        break;
      }
      read_line(text.substr(0, end));
      text.remove_prefix(end + 1);
    }
    if (check_.starts == 0) check_.problems.emplace_back("no start of a run");
    for (const ConsumedSamples& each : saved) compare(each);
    for (const ConsumedStep& entry : entries_) {
      ++(entry.is_skip ? check_.skipped_steps : check_.steps);
      if (entry.is_skip) check_.skipped_samples += entry.end - entry.begin;
    }
    check_.next_sample = next_;
    check_.windows = start_.windows;
    check_.start = start_;
    if (!start_.sources.empty()) check_.sources = count_sources(start_.sources, next_);
    check_.consumed = std::move(entries_);
    return std::move(check_);
  }

 private:
  void report(const std::string& problem) {
    check_.problems.push_back(fmt::format("line {}: {}", check_.lines, problem));
  }

  /// "samples 16 to 31 of epoch 0"
  std::string describe(int64_t begin, int64_t end) const {
    const int64_t windows = start_.windows;
    if (windows == 0) {
      return begin + 1 == end ? fmt::format("sample {}", begin)
                              : fmt::format("samples {} to {}", begin, end - 1);
    }
    return begin + 1 == end
               ? fmt::format("sample {} of epoch {}", begin, begin / windows)
               : fmt::format("samples {} to {} of epoch {}", begin, end - 1, begin / windows);
  }

  void read_line(std::string_view text) {
    const int64_t expected = next_number_++;
    try {
      const LedgerLine line = parse_ledger_line(text);
      if (line.number < expected) {
        --next_number_;
        return report(fmt::format("repeats line {}", line.number));
      }
      if (line.number > expected) {
        report(fmt::format("{} missing before it: its number is {}, expected {}",
                           line.number == expected + 1
                               ? "a line is"
                               : fmt::format("{} lines are", line.number - expected),
                           line.number, expected));
        next_number_ = line.number + 1;
      }
      std::visit([this](const auto& record) { read(record); }, line.record);
    } catch (const IoError& error) {
      report(error.what());
    }
  }

  void read(const LedgerStart& start) {
    if (start.next_sample > 0 && check_.starts > 0) compare(start);
    ++check_.starts;
    start_ = start;
    while (!entries_.empty() && entries_.back().end > start.next_sample) {
      check_.dropped_steps += entries_.back().is_skip ? 0 : 1;
      entries_.pop_back();
    }
    base_ = std::min(base_, start.next_sample);
    next_ = entries_.empty() ? base_ : entries_.back().end;
    if (next_ < start.next_sample) {
      report(fmt::format("the run starts after step {} with sample {}: {} have no record",
                         start.step, start.next_sample, describe(next_, start.next_sample)));
      if (entries_.empty()) base_ = start.next_sample;
    }
    next_ = start.next_sample;
    step_ = start.step;
  }

  /// With the start before.
  void compare(const LedgerStart& start) {
    const auto differs = [&](std::string_view what, const auto& found, const auto& before) {
      if (found == before) return;
      report(fmt::format("{} is {}, another text than that of the lines above: expected {}", what,
                         found, before));
    };
    differs("the hash of the text", printable(start.data), printable(start_.data));
    differs("the number of windows", start.windows, start_.windows);
    differs("train.seq", start.seq, start_.seq);
    differs("train.seed", start.seed, start_.seed);
  }

  void read(const LedgerStep& step) {
    if (check_.starts == 0) return report("a step before any start of a run");
    if (step.first_sample > next_) {
      report(fmt::format("step {} begins with sample {}: {} have no record", step.step,
                         step.first_sample, describe(next_, step.first_sample)));
    } else if (step.first_sample < next_) {
      report_double(step);
    } else if (step.step != step_ + 1) {
      report(fmt::format("step is {}: expected {}", step.step, step_ + 1));
    }
    if (start_.windows == 0) compare_cursors(step);
    const int64_t epoch =
        start_.windows > 0 ? step.first_sample / start_.windows : first_epoch(step);
    if (step.epoch != epoch) {
      report(fmt::format("step {}: epoch is {}: expected {}", step.step, step.epoch, epoch));
    }
    const bool is_skip = !step.skip_reason.empty();
    step_ = is_skip ? step.step - 1 : step.step;
    if (step.end() <= next_) return;
    entries_.push_back({check_.lines, step.step, std::max(next_, step.first_sample), step.end(),
                        is_skip, step.text_hash, step.cursors});
    next_ = step.end();
  }

  static int64_t first_epoch(const LedgerStep& step) {
    return step.cursors.empty() ? step.epoch : step.cursors[0].epoch;
  }

  /// With those of the step before.
  void compare_cursors(const LedgerStep& step) {
    const size_t expected = std::max<size_t>(1, start_.sources.size());
    if (step.cursors.size() != expected) {
      return report(fmt::format("step {} has {} cursors of streams: expected {}", step.step,
                                step.cursors.size(), expected));
    }
    if (start_.sources.empty() && step.cursors[0].position > step.first_sample * start_.seq) {
      report(fmt::format("step {}: the cursor is at token {}: expected at most {}", step.step,
                         step.cursors[0].position, step.first_sample * start_.seq));
    }
    if (entries_.empty() || entries_.back().cursors.size() != expected) return;
    for (size_t i = 0; i < expected; ++i) {
      const StreamCursor &before = entries_.back().cursors[i], &now = step.cursors[i];
      if (now == before || (now > before && now.position > before.position)) continue;
      report(
          fmt::format("step {}: cursor {} is at epoch {}, shard {}, offset {}, token {}: "
                      "expected after epoch {}, shard {}, offset {}, token {}",
                      step.step, i + 1, now.epoch, now.shard, now.offset, now.position,
                      before.epoch, before.shard, before.offset, before.position));
    }
  }

  void report_double(const LedgerStep& step) {
    const auto before = std::ranges::find_if(
        entries_, [&](const ConsumedStep& entry) { return entry.end > step.first_sample; });
    const std::string samples = describe(step.first_sample, std::min(step.end(), next_));
    report(before == entries_.end()
               ? fmt::format("step {} consumes {} once more", step.step, samples)
               : fmt::format("step {} consumes {} once more: expected once, by step {} in line {}",
                             step.step, samples, before->step, before->line));
  }

  void compare(const ConsumedSamples& saved) {
    const auto problem = [&](const std::string& text) {
      check_.problems.push_back(fmt::format("{}: {}", saved.name, text));
    };
    if (saved.next_sample > next_) {
      return problem(fmt::format("has consumed {} samples: {} have no record", saved.next_sample,
                                 describe(next_, saved.next_sample)));
    }
    if (saved.next_sample <= base_) return;
    const auto last = std::ranges::lower_bound(entries_, saved.next_sample, {}, &ConsumedStep::end);
    if (last == entries_.end() || last->end != saved.next_sample) {
      problem(fmt::format("its next sample is {}: no recorded step ends there", saved.next_sample));
    } else if (finished_steps(*last) != saved.step) {
      problem(fmt::format("has made {} steps by sample {}: expected {}, as recorded in line {}",
                          saved.step, saved.next_sample, finished_steps(*last), last->line));
    }
  }

  LedgerCheck check_;
  LedgerStart start_;  // the last one
  std::vector<ConsumedStep> entries_;
  int64_t next_number_ = 1;
  int64_t next_ = 0;  // end of the samples with a record
  int64_t step_ = 0;  // finished ones
  int64_t base_ = 0;  // samples before it have no record, as has been reported
};

}  // namespace

LedgerCheck check_ledger(const std::string& path, std::span<const ConsumedSamples> saved) {
  const std::string text = read_file(path);
  return LedgerChecker().check(text, saved);
}

}  // namespace tandem
