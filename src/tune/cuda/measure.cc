#include "tune/cuda/measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "collectives/cuda/uncompressed_nccl.h"
#include "comm/device/signal_kernels.h"
#include "core/system/log.h"
#include "tandem/random.h"
#include "tune/cuda/flush.h"
#include "tune/measure.h"

namespace tandem::gpu {
namespace {

constexpr size_t kFlushBytes = size_t(256) << 20;  // several times any L2
constexpr double kMinIdleUs = 300, kMaxIdleUs = 20000;
// GPU pause per call of a burst, longer than it takes to enqueue one.
constexpr uint64_t kPauseOfCallNs = 300'000;

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

}  // namespace

Stopwatch::Stopwatch(GpuCommunicator& comm)
    : comm_(comm),
      signals_(std::static_pointer_cast<GpuBuffer>(comm.allocate(0, kMaxGpus))),
      epoch_(sizeof(uint64_t)),
      flush_(kFlushBytes) {}

void Stopwatch::align() {
  // Ranks that share a GPU continue after all have enqueued this: loads and frees of the timed call
  // may wait for a kernel that waits for a peer.
  const Enqueueing call(comm_);
  if (comm_.one_node()) {
    comm_.enqueue([&] {
      launch_enter(signals_->table(), 0, {reinterpret_cast<uint64_t*>(epoch_.data())},
                   comm_.device_deadline(), OpId::align, comm_.stream());
    });
  } else {
    const Tensor word = epoch_.view(DType::i32, {1});
    nccl_all_reduce(comm_, word, word, ReduceOp::sum);
  }
}

double Stopwatch::time_once(const std::function<void()>& run, double idle_us, double* host_us) {
  const cudaStream_t stream = comm_.stream();
  launch_flush(flush_, stream);
  launch_pause(uint64_t(std::clamp(idle_us, kMinIdleUs, kMaxIdleUs) * 1e3), stream);
  align();
  begin_.record(stream);
  const auto before = Clock::now();
  run();
  const double host = microseconds_since(before);
  if (host_us) *host_us = host;
  end_.record(stream);
  comm_.synchronize();
  return microseconds(begin_, end_);
}

std::vector<double> Stopwatch::time_burst(const std::function<void()>& run, int calls) {
  const uint64_t pause_ns = kPauseOfCallNs * uint64_t(calls);
  launch_pause(pause_ns, comm_.stream());
  align();
  std::vector<double> host;
  const auto begin = Clock::now();
  for (int call = 0; call < calls; ++call) {
    const auto before = Clock::now();
    run();
    if (call > 0) host.push_back(microseconds_since(before));
  }
  if (const double us = microseconds_since(begin); us * 1e3 > double(pause_ns)) {
    log_message(LogLevel::warn,
                fmt::format("enqueueing {} calls took {:.0f} us, longer than the GPU paused: what "
                            "they take the host may hold waits for the GPU",
                            calls, us));
  }
  comm_.synchronize();
  return host;
}

std::vector<Timing> Stopwatch::measure(const std::vector<BoundCandidate>& alternatives,
                                       const MeasureOptions& options) {
  const size_t count = alternatives.size(), repeats = size_t(options.repeats);
  std::vector<double> last(count, 1000), times(count * repeats), host(count * repeats);
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t(0));
  uint64_t draw = 0;
  for (size_t round = 0; round < repeats + 2; ++round) {  // two warm-up rounds
    for (size_t i = count; i > 1; --i) {
      std::swap(order[i - 1], order[philox(options.seed, 0, draw++)[0] % i]);
    }
    for (const size_t which : order) {
      double host_us = 0;
      last[which] = time_once(alternatives[which].run, options.idle * last[which], &host_us);
      if (round < 2) continue;
      times[which * repeats + round - 2] = last[which];
      host[which * repeats + round - 2] = host_us;
    }
  }
  std::vector<double> bursts;
  if (options.burst > 1) {
    for (const BoundCandidate& alternative : alternatives) {
      const std::vector<double> burst = time_burst(alternative.run, options.burst);
      bursts.insert(bursts.end(), burst.begin(), burst.end());
    }
    bursts = comm_.slowest(bursts);
  }
  times = comm_.slowest(times);
  host = comm_.slowest(host);
  std::vector<Timing> result;
  for (size_t i = 0; i < count; ++i) {
    const auto slice = [&](const std::vector<double>& all) {
      const size_t each = all.size() / count;
      return std::vector<double>(all.begin() + long(i * each), all.begin() + long((i + 1) * each));
    };
    const std::vector<double> local = slice(times);
    result.push_back({median(local), *std::min_element(local.begin(), local.end()),
                      *std::max_element(local.begin(), local.end()), median(slice(host)),
                      bursts.empty() ? 0 : median(slice(bursts)), local});
  }
  return result;
}

}  // namespace tandem::gpu
