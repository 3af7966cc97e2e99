#include "comm/rendezvous/hang_watch.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "core/system/lines.h"

namespace tandem::control {
namespace {

constexpr int64_t kMs = 1000000;
/// A process whose words have changed since is not looked at.
constexpr int64_t kQuiet = 100 * kMs;
constexpr int64_t kStopped = 300 * kMs, kBusy = 500 * kMs, kIdle = 10000 * kMs;
constexpr int64_t kBusyFactor = 10, kIdleFactor = 100;

struct ProcessState {
  char letter = '?';
  double processor_s = 0;
};

ProcessState state_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  std::getline(file, text);
  const size_t name_end = std::min(text.rfind(')') + 1, text.size());
  const std::vector<std::string> fields = words_of(std::string_view(text).substr(name_end));
  constexpr size_t kUser = 11, kSystem = 12;  // numbers 14 and 15 of the line
  ProcessState state;
  if (fields.size() <= kSystem) return state;
  state.letter = fields[0][0];
  const double ticks = std::atof(fields[kUser].c_str()) + std::atof(fields[kSystem].c_str());
  state.processor_s = ticks / double(sysconf(_SC_CLK_TCK));
  return state;
}

}  // namespace

HangWatch::HangWatch(const Board& board, double step_timeout_s)
    : board_(board), step_timeout_s_(step_timeout_s), seen_(size_t(board.head().slots)) {}

int64_t HangWatch::longest_work_ns() const {
  int64_t longest = 0;
  for (int slot = 0; slot < board_.head().slots; ++slot) {
    longest = std::max(longest, board_.slot(slot).words.longest_work_ns.load());
  }
  return longest;
}

std::string HangWatch::check(int slot, pid_t pid) {
  const ProgressWords& words = board_.slot(slot).words;
  Seen& seen = seen_[size_t(slot)];
  const int64_t now =
      std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  const int64_t since = words.since_ns, elapsed = now - since;
  if (elapsed < kQuiet) {
    seen.stopped_ns = -1;
    return "";
  }
  const ProcessState state = state_of(pid);
  if (since != seen.since_ns) seen = {since, state.processor_s, -1};
  const auto describe = [&](const char* what) {
    const std::string name = activity_name(words);
    return fmt::format("{} for {:.2f} s {}{}", what, double(elapsed) / 1e9,
                       name.empty() ? "between operations" : "in ", name);
  };
  if (state.letter != 'T') {
    seen.stopped_ns = -1;
  } else if (seen.stopped_ns < 0) {
    seen.stopped_ns = now;
  } else if (now - seen.stopped_ns > kStopped) {
    return describe("was stopped (SIGSTOP)");
  }
  const MemberSlot& member = board_.slot(slot);
  const bool trains = member.training == board_.head().generation && member.done == 0;
  if (!trains || words.activity == RankActivity::wait) return "";
  if (step_timeout_s_ > 0 && double(elapsed) > step_timeout_s_ * 1e9) {
    return describe("made no progress");
  }
  if (words.activity != RankActivity::work || words.is_repeated == 0) return "";
  const int64_t longest = longest_work_ns();
  const int64_t busy = std::max(kBusy, kBusyFactor * longest);
  const double computed = state.processor_s - seen.processor_s;
  if (elapsed > busy && computed > double(busy) / 2e9) return describe("made no progress");
  if (elapsed > std::max(kIdle, kIdleFactor * longest) && state.letter != 'R') {
    return describe("made no progress and did not compute");
  }
  return "";
}

}  // namespace tandem::control
