#include "engine/launch/probe.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <latch>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "comm/processes/rank.h"
#include "comm/processes/rendezvous_bootstrap.h"
#include "comm/rendezvous/endpoint.h"
#include "core/system/process/clock.h"
#include "core/system/process/file_limit.h"
#include "engine/parallel/dims.h"

namespace tandem {
namespace {

using ProbeClock = std::chrono::steady_clock;  // one clock for all processes

constexpr int kRanksOfProcess = 128, kBarriers = 5;
constexpr double kProbeDeadline = 60;
// Files of a rank (the event, two epolls, the connection), and others of a process.
constexpr int kFilesOfRank = 4, kOtherFiles = 600;

/// A rank's times in seconds from the start, in memory that the processes share.
struct RankRecord {
  double world = 0, groups = 0;
  std::array<double, kBarriers> barriers{};
  std::array<char, 240> error{};
  bool aborted = false;  ///< the error is another rank's
};

/// Begins the shared memory; records follow.
struct Progress {
  std::atomic<int> settled = 0;  ///< processes whose ranks are done and still present
  std::atomic<bool> measured = false;
  std::atomic<int64_t> bytes = 0;
};

/// Memory of this process, with its share of what it shares; none of files, which processes outside
/// this probe share as well: their begin and end would change it.
int64_t proportional_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string word;
  int64_t all_kib = 0, kib = 0;
  while (file >> word) {
    if ((word == "Pss_Anon:" || word == "Pss_Shmem:") && file >> kib) all_kib += kib;
  }
  return all_kib << 10;
}

class Probe {
 public:
  explicit Probe(const ProbeRequest& request)
      : dims_(request.tp, request.ranks / (request.tp * request.pp), 1, request.pp),
        ranks_(request.ranks),
        processes_((request.ranks + kRanksOfProcess - 1) / kRanksOfProcess) {
    bytes_ = sizeof(Progress) + size_t(ranks_) * sizeof(RankRecord);
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw IoError(fmt::format("{} ranks: no memory", ranks_));
    progress_ = new (memory) Progress;
    records_ = new (static_cast<std::byte*>(memory) + sizeof(Progress)) RankRecord[size_t(ranks_)];
    launch_.size = ranks_;
    launch_.host = "127.0.0.1";
    launch_.one_host = launch_.has_store = true;
    launch_.world = "probe " + control::hex_of(control::random_digest());
  }
  ~Probe() {
    for (const pid_t child : children_) kill(child, SIGKILL);
    for (const pid_t child : children_) waitpid(child, nullptr, 0);
    munmap(progress_, bytes_);
  }
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  ProbeResult run() {
    Launch at_store = launch_;
    at_store.world = store_world(launch_.world);
    control::Connection listener = control::listen_on(control::endpoint_of(at_store));
    start_ = ProbeClock::now();
    const pid_t parent = getpid();
    for (int process = 0; process < processes_; ++process) {  // before any thread of this one
      const pid_t child = fork();
      if (child < 0)
        throw Unsupported(fmt::format("{} ranks: fork: {}", ranks_, describe_errno(errno)));
      if (child == 0) {
        listener.close();
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent) run_process(process);
        _exit(0);
      }
      children_.push_back(child);
    }
    const int64_t before = proportional_bytes();
    control::StoreServer store(std::move(listener), control::credentials_of({}, at_store.world),
                               ranks_);
    const bool complete = await_processes();
    if (complete) progress_->bytes += proportional_bytes() - before;
    progress_->measured = true;
    for (const pid_t child : std::exchange(children_, {})) waitpid(child, nullptr, 0);
    throw_first_error();
    if (!complete) throw IoError(fmt::format("{} ranks: a process ended without a word", ranks_));
    return result();
  }

 private:
  double now() const { return seconds_since(start_); }

  /// False if a process has ended before.
  bool await_processes() {
    while (progress_->settled < processes_) {
      const pid_t ended = waitpid(-1, nullptr, WNOHANG);
      if (ended > 0) {
        std::erase(children_, ended);
        return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }

  void run_process(int process) {
    const int first = process * kRanksOfProcess;
    const int count = std::min(kRanksOfProcess, ranks_ - first);
    const int64_t before = proportional_bytes();
    std::latch done(count), leave(1);
    std::vector<std::thread> threads;
    for (int rank = first; rank < first + count; ++rank) {
      threads.emplace_back([&, rank] { run_rank(rank, done, leave); });
    }
    done.wait();
    progress_->bytes += proportional_bytes() - before;
    ++progress_->settled;
    while (!progress_->measured) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    leave.count_down();
    for (std::thread& thread : threads) thread.join();
  }

  void run_rank(int rank, std::latch& done, std::latch& leave) {
    RankRecord& record = records_[rank];
    bool counted = false;
    try {
      Launch launch = launch_;
      launch.rank = launch.local_rank = rank;
      const auto world = processes::new_member(std::make_unique<processes::RendezvousBootstrap>(
                                                   launch, control::Secret{}, kProbeDeadline),
                                               {.deadline_s = kProbeDeadline});
      world->barrier("world");
      record.world = now();
      const ParallelGroups groups(*world, dims_, false);
      check(groups.tp(), kTp, rank);
      check(groups.copies(), kCopies, rank);
      if (Communicator* pp = groups.along(kPp)) check(*pp, kPp, rank);
      world->barrier("groups");
      record.groups = now();
      for (double& seconds : record.barriers) {
        const double begin = now();
        world->barrier();
        seconds = now() - begin;
      }
      counted = true;
      done.count_down();
      leave.wait();
    } catch (const std::exception& error) {
      record.aborted = dynamic_cast<const Aborted*>(&error) != nullptr;
      std::string_view(error.what()).copy(record.error.data(), record.error.size() - 1);
      if (!counted) done.count_down();
    }
  }

  void check(Communicator& group, Axes axes, int rank) const {
    const auto expected = dims_.members(axes, rank);
    const auto blobs = group.exchange(std::as_bytes(std::span(&rank, 1)), "members");
    std::vector<int> found(blobs.size(), -1);
    for (size_t i = 0; i < blobs.size(); ++i) {
      std::memcpy(&found[i], blobs[i].data(), std::min(blobs[i].size(), sizeof rank));
    }
    if (found == expected) return;
    throw Mismatch(fmt::format("group of rank {}: members {}: expected {}", rank,
                               fmt::join(found, ", "), fmt::join(expected, ", ")));
  }

  void throw_first_error() const {
    for (const bool aborted : {false, true}) {
      for (int rank = 0; rank < ranks_; ++rank) {
        const RankRecord& record = records_[rank];
        if (record.error[0] == 0 || record.aborted != aborted) continue;
        throw Unsupported(fmt::format("{} ranks: rank {}: {}", ranks_, rank, record.error.data()));
      }
    }
  }

  ProbeResult result() const {
    ProbeResult result;
    result.processes = processes_;
    std::array<double, kBarriers> barriers{};
    double groups = 0;
    for (int rank = 0; rank < ranks_; ++rank) {
      const RankRecord& record = records_[rank];
      result.world_s = std::max(result.world_s, record.world);
      groups = std::max(groups, record.groups);
      for (size_t i = 0; i < barriers.size(); ++i) {
        barriers[i] = std::max(barriers[i], record.barriers[i]);
      }
    }
    std::sort(barriers.begin(), barriers.end());
    result.groups_s = groups - result.world_s;
    result.barrier_ms = 1e3 * barriers[kBarriers / 2];
    result.bytes_per_rank = std::max<int64_t>(0, progress_->bytes) / ranks_;  // the rest is noise
    return result;
  }

  const ParallelDims dims_;
  const int ranks_, processes_;
  size_t bytes_ = 0;
  Progress* progress_ = nullptr;
  RankRecord* records_ = nullptr;
  Launch launch_;
  ProbeClock::time_point start_;
  std::vector<pid_t> children_;
};

}  // namespace

ProbeResult probe_world(const ProbeRequest& request) {
  const int stage = request.tp * request.pp;
  if (request.ranks < 1 || request.tp < 1 || request.pp < 1 || request.ranks % stage != 0) {
    throw InvalidArgument(fmt::format("{} ranks with tp {} pp {}: expected a multiple of {}",
                                      request.ranks, request.tp, request.pp, std::max(stage, 1)));
  }
  const int files = raise_file_limit();
  const int needed =
      std::max(request.ranks, kFilesOfRank * std::min(request.ranks, kRanksOfProcess)) +
      kOtherFiles;
  if (files < needed) {
    throw Unsupported(fmt::format("{} ranks: a process may open {} files: expected {} (ulimit -n)",
                                  request.ranks, files, needed));
  }
  return Probe(request).run();
}

}  // namespace tandem
