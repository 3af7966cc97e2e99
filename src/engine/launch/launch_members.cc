#include "engine/launch/launch_members.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "comm/rendezvous/endpoint.h"
#include "comm/rendezvous/secret.h"
#include "core/system/console.h"
#include "engine/parallel/dims.h"

namespace tandem {
namespace {

/// Losses of a rank in a row, by the same cause and without a further step, that end the run.
constexpr int kMaxFruitless = 3;

double milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

}  // namespace

namespace {

control::Connection listen_for_store(Launch launch) {
  if (launch.one_host || launch.port == 0) return control::listen_on(control::endpoint_of(launch));
  const int last = launch.port + kStorePorts;
  while (true) {  // stores of worlds that ranks leave have theirs for a while
    ++launch.port;
    try {
      return control::listen_on(control::endpoint_of(launch), 0);
    } catch (const InvalidArgument&) {
      if (launch.port == last) throw;
    }
  }
}

}  // namespace

LaunchStore start_store(Launch launch, const std::string& run_id, const control::Secret& secret) {
  launch.world = store_world("torchrun " + run_id);
  control::Connection listener = listen_for_store(launch);
  const int port = control::port_of(listener);
  return {std::make_unique<control::StoreServer>(
              std::move(listener), control::credentials_of(secret, launch.world), launch.size),
          port};
}

LaunchMembers::LaunchMembers(const LaunchRequest& request, const Launch& launch,
                             const control::Secret& secret, control::Board& board,
                             const LostLauncher* lost, RankProcesses& processes)
    : launch_(launch),
      secret_(secret),
      processes_(processes),
      min_dp_(request.min_dp),
      start_timeout_s_(request.start_timeout_s),
      restarts_left_(request.restarts),
      board_(board),
      events_(request.out) {
  board_.head().min_dp = min_dp_;
  if (lost) note_launcher(*lost);
  for (int slot = 0; slot < board_.head().slots; ++slot) {
    board_.reset_slot(slot, slot < request.ranks ? slot : control::kSpare);
  }
  processes_.use_board(board_, request.step_timeout_s);
}

void LaunchMembers::note_launcher(const LostLauncher& lost) {
  control::BoardHead& head = board_.head();
  head.closed = 0;
  head.tp = head.dp = 0;  // all ranks begin again, and state their layout
  const int64_t finished = finished_steps(board_);
  LaunchEvent event{"lost", -1, lost.pid, processes_.host(0), finished + 1, lost.cause, {}};
  events_.add(event);
  event.event = "recovered";
  losses_.push_back({event, kLauncher, finished, lost.noticed});
  max_step_ = finished;
}

std::string LaunchMembers::label(int slot) const {
  const int rank = board_.slot(slot).rank;
  return rank < 0 ? "spare" : std::to_string(rank);
}

void LaunchMembers::begin_generation() {
  control::BoardHead& head = board_.head();
  const uint32_t generation = head.generation + 1;
  stores_.push_back(start_store(launch_, board_.run_id(generation), secret_));
  began_ = Clock::now();
  head.size = launch_.size;
  head.port = stores_.back().port;
  head.resumes = head.has_output.load();
  head.generation = generation;
  board_.notify_change();
}

bool LaunchMembers::is_complete() const {
  for (int slot = 0; slot < board_.head().slots; ++slot) {
    if (is_done(slot)) return true;
  }
  return false;
}

bool LaunchMembers::was_complete() const {
  const uint32_t generation = board_.head().generation;
  for (int slot = 0; slot < board_.head().slots; ++slot) {
    if (is_done(slot) && board_.slot(slot).training != generation) return true;
  }
  return false;
}

int LaunchMembers::find_spare() const {
  for (int slot = 0; slot < board_.head().slots; ++slot) {
    if (is_spare(slot)) return slot;
  }
  return -1;
}

int64_t finished_steps(const control::Board& board) {
  int64_t step = -1;
  for (int slot = 0; slot < board.head().slots; ++slot) {
    const control::MemberSlot& member = board.slot(slot);
    if (member.rank >= 0) step = std::max(step, member.step.load());
  }
  return step;
}

LaunchEvent LaunchMembers::describe(const char* event, const LostProcess& lost) const {
  const control::MemberSlot& member = board_.slot(lost.slot);
  const Clock::time_point alive{std::chrono::nanoseconds(member.words.since_ns)};
  return {event,
          member.rank,
          lost.pid,
          processes_.host(lost.slot),
          member.step + 1,
          lost.cause,
          milliseconds(Clock::now() - alive)};
}

std::string LaunchMembers::name_process(int process, const std::string& host) const {
  return launch_.one_host ? std::to_string(process) : fmt::format("{} on {}", process, host);
}

std::string LaunchMembers::check_hang(int slot) {
  if (is_spare(slot) || hangs_.contains(slot)) return "";
  std::string cause = processes_.find_hang(slot);
  const control::MemberSlot& member = board_.slot(slot);
  if (member.training != board_.head().generation && member.words.activity != RankActivity::wait &&
      milliseconds(Clock::now() - began_) > 1e3 * start_timeout_s_) {
    cause = fmt::format("began no step within {:.3g} s", start_timeout_s_);
  }
  const char* event = "hung";
  switch (member.fault.load()) {
    case control::ProcessFault::none:
      break;
    case control::ProcessFault::corrupt:
      event = "corrupt";
      cause = "was taken out for corrupt data";
      break;
    case control::ProcessFault::lost_gpu:
      event = "lost";
      cause = "was taken out, as all calls to its GPU fail";
      break;
  }
  if (cause.empty()) return "";
  events_.add(describe(event, {slot, processes_.pid(slot), cause}));
  hangs_[slot] = {event, cause, Clock::now()};
  return cause;
}

bool LaunchMembers::remove_replica(int rank) {
  control::BoardHead& head = board_.head();
  const int fewer = head.dp - head.ep;  // the replicas that share experts leave together
  if (head.tp == 0 || min_dp_ == 0 || fewer < min_dp_ || fewer < 1) return false;
  const ParallelDims before(head.tp, head.dp, head.ep, head.pp);
  const ParallelDims after(head.tp, fewer, head.ep, head.pp);
  const int lost = before.index(kExpertDp, rank);
  for (int slot = 0; slot < head.slots; ++slot) {
    const int old = board_.slot(slot).rank;
    if (old < 0) continue;
    const int index = before.index(kExpertDp, old);
    board_.slot(slot).rank = index == lost ? control::kSpare
                                           : after.rank_of(kExpertDp, before.group(kExpertDp, old),
                                                           index - (index > lost));
  }
  head.dp = fewer;
  launch_.size = after.ranks();
  return true;
}

int LaunchMembers::replace(LostProcess& lost, std::string& reason) {
  auto noticed = Clock::now();
  const int rank = board_.slot(lost.slot).rank;
  std::string loss = fmt::format("{} {}", rank, lost.cause);
  if (const auto hang = hangs_.extract(lost.slot)) {
    lost.cause = hang.mapped().cause;
    noticed = hang.mapped().noticed;
    loss = fmt::format("{} {}", rank, hang.mapped().event);
  } else {
    events_.add(describe("lost", lost));
  }
  const int64_t step = finished_steps(board_);
  fruitless_ = step <= max_step_ && loss == last_loss_ ? fruitless_ + 1 : 1;
  max_step_ = std::max(step, max_step_);
  last_loss_ = loss;
  if (fruitless_ >= kMaxFruitless) {
    reason = fmt::format("the {}rd time in a row without a further step", fruitless_);
    return kNotReplaced;
  }
  const LaunchEvent recovered = describe("recovered", lost);
  int heir = find_spare();
  if (heir >= 0) {
    board_.slot(lost.slot).rank = control::kVacant;
    board_.slot(heir).rank = rank;
  } else if (restarts_left_ > 0 && processes_.find_host(lost.slot)) {
    --restarts_left_;
    heir = lost.slot;
    board_.reset_slot(lost.slot, rank);
    board_.slot(lost.slot).host = processes_.host_index(lost.slot);
  } else if (remove_replica(rank)) {
    heir = kFewerRanks;
    board_.slot(lost.slot).rank = control::kVacant;
  } else {
    reason = "no process is left to take its rank";
    return kNotReplaced;
  }
  losses_.push_back({recovered, heir, step, noticed});
  begin_generation();
  return heir;
}

std::string LaunchMembers::report(const Loss& loss) const {
  const LaunchEvent& event = loss.event;
  const std::string process = name_process(event.process, event.host);
  const std::string when =
      event.step == 0 ? "before its first step" : fmt::format("in step {}", event.step);
  std::string text, heir = fmt::format("the run has {} ranks now", launch_.size);
  if (loss.heir == kLauncher) {
    text = fmt::format("the launcher (process {}) {} {}", process, event.cause, when);
    heir = "it and its ranks were started again";
  } else {
    text = fmt::format("rank {} (process {}) {} {}, noticed within {:.3g} ms", event.rank, process,
                       event.cause, when, *event.noticed_ms);
  }
  if (event.replacement) {
    heir = fmt::format("process {} has taken its rank",
                       name_process(*event.replacement, event.replacement_host));
  }
  return fmt::format(
      "tandem: launch: {}; {}; the run paused for {:.3g} s and continues after step {}", text, heir,
      *event.recovered_ms / 1e3, *event.continues_after);
}

void LaunchMembers::check_recovered() {
  const uint32_t generation = board_.head().generation;
  int64_t first_ns = 0, first_step = 0;
  for (int slot = 0; slot < board_.head().slots; ++slot) {
    const control::MemberSlot& member = board_.slot(slot);
    if (member.rank < 0) continue;
    if (member.training.load(std::memory_order_acquire) != generation) return;
    first_ns = std::max(first_ns, member.first_step_ns.load());
    first_step = member.first_step;
  }
  const Clock::time_point recovered{std::chrono::nanoseconds(first_ns)};
  for (Loss& loss : losses_) {
    LaunchEvent& event = loss.event;
    event.recovered_ms = milliseconds(recovered - loss.noticed);
    event.continues_after = first_step;
    event.steps_lost = std::max<int64_t>(0, loss.finished - first_step);
    if (loss.heir >= 0) {
      event.replacement = processes_.pid(loss.heir);
      event.replacement_host = processes_.host(loss.heir);
    }
    complain(report(loss));
    events_.add(event);
  }
  losses_.clear();
  stores_.erase(stores_.begin(), stores_.end() - 1);  // all ranks have left those worlds
}

void LaunchMembers::note_stop(const LostProcess& lost, const std::string& reason) {
  LaunchEvent event = describe("stopped", lost);
  if (!reason.empty()) event.cause += ": " + reason;
  events_.add(event);
  for (const Loss& loss : losses_) {
    const std::string who =
        loss.heir == kLauncher ? "the launcher" : fmt::format("rank {}", loss.event.rank);
    complain(
        fmt::format("tandem: launch: {} (process {}) {} before that, and was not replaced in time",
                    who, name_process(loss.event.process, loss.event.host), loss.event.cause));
  }
}

void LaunchMembers::begin_saving() {
  for (int slot = 0; slot < board_.head().slots; ++slot) {
    if (!has_rank(slot)) continue;
    if (!processes_.find_host(slot)) throw Error("no host is left");
    board_.reset_slot(slot, board_.slot(slot).rank);
    board_.slot(slot).host = processes_.host_index(slot);
  }
  hangs_.clear();
  losses_.clear();
  stores_.clear();
  board_.head().closed = 0;
  begin_generation();
}

void LaunchMembers::close(uint32_t how) {
  board_.head().closed = how;
  board_.notify_change();
}

}  // namespace tandem
