#include "engine/launch/launch_injector.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using FaultClock = LaunchInjector::Clock;

constexpr double kPause = 0.1;
/// Time in which a slow process runs once and is stopped once.
constexpr std::chrono::duration<double> kSlowPeriod{0.04};

std::string random_plan(const std::string& option) {
  const std::string values = option.substr(option.find(':') + 1);
  uint64_t seed = 0;
  double rate = 0.01;
  const char* const end = values.data() + values.size();
  auto parsed = std::from_chars(values.data(), end, seed);
  if (parsed.ec == std::errc() && parsed.ptr < end && *parsed.ptr == ',') {
    parsed = std::from_chars(parsed.ptr + 1, end, rate);
  }
  if (parsed.ec != std::errc() || parsed.ptr != end || !(rate >= 0 && rate <= 1) ||
      seed > uint64_t{1} << 50) {
    throw InvalidArgument(fmt::format(
        "launch --inject: {}: expected a file, or random:SEED,RATE with a rate from 0 to 1",
        printable(option)));
  }
  return fmt::format(
      "seed = {}\n[random]\nrate = {:.17f}\nkinds = [\"kill\", \"hang\", \"pause\", \"slow\"]\n",
      seed, rate);
}

FaultClock::duration to_duration(double seconds) {
  return std::chrono::duration_cast<FaultClock::duration>(std::chrono::duration<double>(seconds));
}

/// Whether the fault ends the process: by itself, or because it then counts as hanging.
bool ends_process(const Fault& fault) {
  constexpr double kHangs = 0.3;  // comm/rendezvous/hang_watch.h
  return fault.kind == FaultKind::kill || fault.kind == FaultKind::hang ||
         (fault.kind == FaultKind::pause && fault.seconds > kHangs);
}

}  // namespace

FaultPlan launch_faults(const std::string& option, int ranks) {
  const bool random = option.starts_with("random:");
  FaultPlan plan(random ? random_plan(option) : read_small_file(option), option, ranks);
  std::vector<FaultKind> kinds = plan.random_kinds();
  for (const Fault& fault : plan.listed()) {
    kinds.push_back(fault.kind);
    if (!fault.phase && fault.span.empty()) continue;
    throw ConfigError(
        fmt::format("{}: {}: a launcher slows whole processes, and kills them at any "
                    "moment; tandem train --inject has phases and spans",
                    option,
                    fault.phase ? fmt::format("phase {}", name_of(*fault.phase))
                                : "span " + printable(fault.span)));
  }
  for (const FaultKind kind : kinds) {
    if (kind <= FaultKind::slow) continue;
    throw ConfigError(fmt::format(
        "{}: kind {}: expected kill, hang, pause or slow; tandem train --inject has the others",
        option, name_of(kind)));
  }
  return plan;
}

LaunchInjector::LaunchInjector(FaultPlan plan, const control::Board& board,
                               RankProcesses& processes, int64_t first_step, std::string out)
    : plan_(std::move(plan)),
      board_(board),
      processes_(processes),
      out_(std::move(out)),
      next_step_(first_step) {}

void LaunchInjector::run() {
  const int slots = board_.head().slots;
  int64_t begun = 0;
  for (int slot = 0; slot < slots; ++slot) {
    if (board_.slot(slot).done != 0) return release();  // the others end, too
    begun = std::max(begun, board_.slot(slot).step + 1);
  }
  for (; next_step_ <= begun; ++next_step_) {
    for (const Fault& fault : plan_.at(next_step_)) {
      for (int slot = 0; slot < slots; ++slot) {
        if (board_.slot(slot).rank != fault.rank) continue;
        if (processes_.is_running(slot) && processes_.pid(slot) > 0) inject(fault, slot);
      }
    }
  }
  const auto now = Clock::now();
  for (auto& [slot, state] : stopped_) advance(slot, state, now);
  std::erase_if(stopped_, [&](const auto& entry) {
    const Stopped& state = entry.second;
    return !state.stopped && state.end && now >= *state.end;
  });
}

void LaunchInjector::inject(const Fault& fault, int slot) {
  const auto now = Clock::now();
  const std::chrono::duration<double> time = std::chrono::system_clock::now().time_since_epoch();
  injected_.push_back({fault, slot, processes_.pid(slot), time.count(), now});
  if (ends_process(fault)) {
    stopped_.erase(slot);
    processes_.send_signal(slot, fault.kind == FaultKind::kill ? SIGKILL : SIGSTOP);
    return;
  }
  const bool hangs =
      std::ranges::any_of(injected_, [&](const Injected& other) { return is_lost(slot, other); });
  if (hangs) return;  // is stopped or killed already: continuing it would undo that fault
  const bool is_slow = fault.kind == FaultKind::slow;
  std::optional<Clock::time_point> end;
  if (!is_slow || fault.seconds >= 0) {
    end = now + to_duration(fault.seconds < 0 ? kPause : fault.seconds);
  }
  processes_.send_signal(slot, SIGSTOP);
  const auto slow_until =
      now + to_duration(kSlowPeriod.count() * fault.percent / (100 + fault.percent));
  stopped_[slot] = {is_slow, fault.percent, end, true, is_slow ? slow_until : *end};
}

/// Whether that fault ends the process that the slot has now.
bool LaunchInjector::is_lost(int slot, const Injected& injected) const {
  return injected.slot == slot && injected.process == processes_.pid(slot) &&
         ends_process(injected.fault);
}

void LaunchInjector::advance(int slot, Stopped& state, Clock::time_point now) {
  if (now < state.change) return;
  const bool ends = state.end && now >= *state.end;
  if (!state.stopped && ends) return;
  state.stopped = !state.stopped;
  processes_.send_signal(slot, state.stopped ? SIGSTOP : SIGCONT);
  const double stopped_share = state.percent / (100 + state.percent);
  state.change =
      now + to_duration(kSlowPeriod.count() * (state.stopped ? stopped_share : 1 - stopped_share));
}

void LaunchInjector::note_loss(int slot, const std::string& cause) {
  stopped_.erase(slot);
  const auto now = Clock::now();
  bool caused = false;
  for (Injected& each : injected_) {
    if (!is_lost(slot, each)) continue;
    caused = true;
    if (each.noticed_ms) continue;
    each.noticed_ms = std::chrono::duration<double, std::milli>(now - each.begin).count();
    each.cause = cause;
  }
  if (!caused) false_alarms_.emplace(std::pair(slot, processes_.pid(slot)), cause);
}

void LaunchInjector::release() {
  for (const auto& [slot, state] : stopped_) {
    if (state.stopped) processes_.send_signal(slot, SIGCONT);
  }
  stopped_.clear();
}

void LaunchInjector::report() const {
  std::string lines;
  std::map<std::string, int> counts;
  std::vector<double> noticed;
  int expected = 0;
  for (const Injected& each : injected_) {
    const std::string kind(name_of(each.fault.kind));
    ++counts[kind];
    expected += ends_process(each.fault);
    nlohmann::ordered_json json{{"kind", kind},
                                {"rank", each.fault.rank},
                                {"process", each.process},
                                {"step", each.fault.step},
                                {"time_s", each.time_s},
                                {"noticed_ms", nullptr},
                                {"cause", nullptr}};
    if (each.noticed_ms) {
      json["noticed_ms"] = std::round(*each.noticed_ms * 1e3) / 1e3;
      json["cause"] = each.cause;
      noticed.push_back(*each.noticed_ms);
    }
    lines += dump_json(json) + "\n";
  }
  for (const auto& [process, cause] : false_alarms_) {
    const nlohmann::ordered_json json{
        {"kind", "false_alarm"}, {"process", process.second}, {"cause", cause}};
    lines += dump_json(json) + "\n";
  }
  if (!out_.empty()) {
    try {
      replace_file(out_ + "/faults.jsonl", lines);
    } catch (const IoError& error) {
      complain(std::string("tandem: launch: warning: ") + error.what());
    }
  }
  std::ranges::sort(noticed);
  std::string kinds;
  for (const auto& [kind, count] : counts) {
    kinds += fmt::format("{}{} {}", kinds.empty() ? ": " : ", ", count, kind);
  }
  std::string text = fmt::format("tandem: launch: injected {} faults{}", injected_.size(), kinds);
  if (expected > 0) text += fmt::format("; {} of {} lost ranks noticed", noticed.size(), expected);
  if (!noticed.empty()) {
    text += fmt::format(", median {:.3g} ms, max {:.3g} ms", noticed[noticed.size() / 2],
                        noticed.back());
  }
  complain(text + fmt::format("; {} false alarms", false_alarms_.size()));
}

}  // namespace tandem
