#include "bench/cuda/tile_recorder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "bench/cuda/clock.h"
#include "bench/record_call.h"
#include "core/cuda/common_stream.h"
#include "core/system/log.h"

namespace tandem::gpu {
namespace {

constexpr size_t kBarriers = 32;
constexpr double kIdleUs = 5000;  // before the recorded call, so that the SM clock settles

size_t multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "current device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  return size_t(count);
}

template <typename T>
std::vector<T> read_back(const DeviceMemory& memory) {
  std::vector<T> host(memory.bytes() / sizeof(T));
  this_share()->synchronize();  // no stream orders the copy
  const CommonStream stream(Common::prompt);
  check(cudaMemcpyAsync(host.data(), memory.data(), host.size() * sizeof(T), cudaMemcpyDeviceToHost,
                        stream.get()),
        "read a timeline");
  check(cudaStreamSynchronize(stream.get()), "read a timeline");
  return host;
}

/// Lead of each rank's timer over rank 0's, in nanoseconds.
std::vector<int64_t> clock_offsets(const std::vector<std::vector<uint64_t>>& timestamps, int rank) {
  std::vector<int64_t> offsets;
  int64_t worst = 0;
  for (const std::vector<uint64_t>& of_rank : timestamps) {
    std::vector<int64_t> ahead;
    for (size_t i = 0; i < kBarriers; ++i) ahead.push_back(int64_t(of_rank[i] - timestamps[0][i]));
    std::sort(ahead.begin(), ahead.end());
    offsets.push_back(ahead[kBarriers / 2]);
    worst = std::max(worst, ahead[kBarriers * 3 / 4] - ahead[kBarriers / 4]);
  }
  if (rank == 0) {
    log_message(
        LogLevel::info,
        fmt::format(
            "timeline: the GPUs' clocks agree within {:.2f} us in half of {} barriers; a step "
            "is {} ns",
            double(worst) / 1e3, kBarriers, timestamps[0][kBarriers + 1]));
  }
  return offsets;
}

}  // namespace

TileRecorder::TileRecorder(const RecordedTiles& tiles)
    : tiles_(tiles),
      records_(size_t(tiles.rows) * size_t(tiles.columns) * sizeof(TileRecord)),
      products_(multiprocessors() * kProductWords * sizeof(uint32_t)) {}

TileLog TileRecorder::log() const {
  return {reinterpret_cast<TileRecord*>(records_.data()),
          reinterpret_cast<uint32_t*>(products_.data()), tiles_.columns};
}

void TileRecorder::clear(cudaStream_t stream) const {
  check(cudaMemsetAsync(records_.data(), 0, records_.bytes(), stream), "clear a timeline");
}

std::vector<TileRecord> TileRecorder::read() const {
  return read_back<TileRecord>(records_);
}

std::vector<RankEvents> record_tiles(GpuCommunicator& comm, Stopwatch& stopwatch,
                                     const TileRecorder& recorder, const RecordedCall& call) {
  const cudaStream_t stream = comm.stream();
  stopwatch.time_once(call.run, kIdleUs);  // performs first-call setup
  // Timestamps of the barriers and of the call, and the timer's step.
  const DeviceMemory memory((kBarriers + 2) * sizeof(uint64_t));
  auto* timestamps = reinterpret_cast<uint64_t*>(memory.data());
  for (size_t i = 0; i < kBarriers; ++i) {
    stopwatch.align();
    launch_timestamp(timestamps + i, stream);
  }
  launch_timer_step(timestamps + kBarriers + 1, stream);
  recorder.clear(stream);
  comm.synchronize();
  Event base(Event::Kind::timing);
  stopwatch.time_once(
      [&] {
        launch_timestamp(timestamps + kBarriers, stream);
        base.record(stream);
        call.run();
      },
      kIdleUs);
  const auto local = read_back<uint64_t>(memory);
  std::vector<std::vector<uint64_t>> all;
  for (const auto& blob : comm.exchange(std::as_bytes(std::span(local)), "timeline clocks")) {
    auto& of_rank = all.emplace_back(local.size());
    std::memcpy(of_rank.data(), blob.data(), of_rank.size() * sizeof(uint64_t));
  }
  const std::vector<int64_t> offsets = clock_offsets(all, comm.rank());
  const int64_t origin = int64_t(all[0][kBarriers]) + offsets[size_t(comm.rank())];
  return gather_events(comm, {comm.rank(), call.events(recorder.read(), local[kBarriers], base),
                              TimePoint(std::chrono::nanoseconds(origin))});
}

}  // namespace tandem::gpu
