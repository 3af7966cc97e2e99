// Per-tile records of fused kernels, in builds configured with TANDEM_DEVICE_TIMELINE.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>
#include <vector>

#include "bench/cuda/clock.h"
#include "bench/cuda/tile_recorder.h"
#include "bench/cuda/verify.h"
#include "comm/device/signal_kernels.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/candidates.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Timeline : public OnGpus {};

uint64_t read_word(const GpuCommunicator& comm, const DeviceMemory& memory) {
  return read<uint64_t>(comm, memory.data(), 1)[0];
}

// Times of a record relative to `base`, in chronological order: those of the GEMM and its epilogue,
// or those of sending the tile.
std::vector<int32_t> times(const TileRecord& r, uint64_t base, bool gather, bool is_local,
                           bool sending, bool under_product) {
  const bool stalled = r.stalled_begin != 0 || r.stalled_end != 0;
  std::vector<uint32_t> words;
  if (gather && !is_local) words = {r.wait_begin, r.wait_end};
  words.push_back(r.product_begin);
  if (stalled && under_product) words.insert(words.end(), {r.stalled_begin, r.stalled_end});
  words.push_back(r.product_end);
  const bool stored = r.store_begin != 0 || r.store_end != 0;
  if (stored) words.push_back(r.store_begin);
  if (stalled && !under_product && is_local != sending) {
    words.insert(words.end(), {r.stalled_begin, r.stalled_end});
  }
  if (sending) {
    words.insert(words.end(), {r.wait_begin, r.wait_end});
  } else if (stored) {
    words.push_back(r.store_end);
  }
  std::vector<int32_t> result;
  for (const uint32_t word : words) result.push_back(int32_t(word - uint32_t(base)));
  return result;
}

void expect_whole(const std::vector<TileRecord>& records, const TileGrid& grid, uint64_t base,
                  uint64_t after, bool gather, const Candidate& candidate) {
  std::map<uint32_t, std::vector<std::pair<int32_t, int32_t>>> products;  // by SM
  for (int tile = 0; tile < grid.tiles(); ++tile) {
    const TileRecord& r = records[size_t(tile)];
    const bool is_local = grid.shard_of(tile) == grid.rank;
    const std::string label = fmt::format("{} rank {} tile {}", candidate.name, grid.rank, tile);
    EXPECT_EQ(r.products, 1u) << label;
    EXPECT_EQ(r.stores, 1u) << label;
    EXPECT_EQ(r.waits, gather && !is_local ? 1u : 0u) << label;
    const bool sent = !gather && (r.wait_begin != 0 || r.wait_end != 0);
    EXPECT_FALSE(sent && is_local) << label;
    EXPECT_TRUE(sent || r.store_end != 0) << label;
    for (const bool sending : {false, true}) {
      if (sending && !sent) continue;
      const auto taken = times(r, base, gather, is_local, sending, candidate.family == "fused");
      EXPECT_TRUE(std::is_sorted(taken.begin(), taken.end())) << label;
      EXPECT_GE(taken.front(), 0) << label;
      EXPECT_LE(taken.back(), int32_t(after - base)) << label;
    }
    EXPECT_LT(r.processor, 1024u) << label;
    products[r.processor].emplace_back(int32_t(r.product_begin - uint32_t(base)),
                                       int32_t(r.product_end - uint32_t(base)));
  }
  for (auto& [processor, list] : products) {
    std::sort(list.begin(), list.end());
    for (size_t i = 1; i < list.size(); ++i) {
      EXPECT_LE(list[i - 1].second, list[i].first)
          << candidate.name << " multiprocessor " << processor;
    }
  }
}

// Runs every candidate that records, several calls each under random delays, and
// checks each call separately.
template <typename Op, typename Spans>
int try_candidates(GpuCommunicator& comm, Op& op, const tandem::Operands& operands, bool gather,
                   const Spans& spans) {
  const cudaStream_t stream = comm.stream();
  const DeviceMemory before(sizeof(uint64_t)), after(sizeof(uint64_t));
  int tried = 0;
  const Tensor& out = operands.out;
  for (const Candidate& candidate : candidates_of(op)) {
    const RecordedTiles tiles = op.recorded_tiles(candidate);
    if (tiles.rows == 0) continue;
    ++tried;
    const TileGrid grid{tiles.rows, tiles.columns, comm.rank(), comm.size()};
    const TileRecorder recorder(tiles);
    uint64_t bits = 0;
    for (int call = 0; call < 4; ++call) {
      const bool records = call < 3;  // the last call records nothing more
      op.record_tiles(records ? recorder.log() : TileLog{});
      recorder.clear(stream);
      if ((call + comm.rank()) % 3 == 0) launch_pause(40000, stream);
      launch_timestamp(reinterpret_cast<uint64_t*>(before.data()), stream);
      poison(out, stream);
      candidate.run(operands);
      launch_timestamp(reinterpret_cast<uint64_t*>(after.data()), stream);
      comm.synchronize();
      const auto recorded = recorder.read();
      if (records) {
        expect_whole(recorded, grid, read_word(comm, before), read_word(comm, after), gather,
                     candidate);
        EXPECT_NO_THROW(spans(recorded, grid, read_word(comm, before))) << candidate.name;
      } else {
        EXPECT_TRUE(std::all_of(recorded.begin(), recorded.end(), [](const TileRecord& r) {
          return r.products + r.stores + r.waits == 0;
        }));
      }
      const uint64_t now = digest(out, stream);
      EXPECT_TRUE(bits == 0 || bits == now) << candidate.name;
      bits = now;
    }
  }
  return tried;
}

TEST_P(Timeline, HasEveryTileOfACallOnceAndInOrder) {
  std::atomic<int> tried = 0;
  run([&](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape{512 * comm.size(), 1000, 512};
    const Shard local = shard_of(shape.m, comm.size(), comm.rank());
    const size_t element = size_of(shape.dtype);
    const DeviceMemory rows(size_t(shape.m * shape.k) * element),
        weight(size_t(shape.n * shape.k) * element), result(size_t(shape.m * shape.n) * element);
    const Tensor all = rows.view(shape.dtype, {shape.m, shape.k}),
                 w = weight.view(shape.dtype, {shape.n, shape.k}),
                 out = result.view(shape.dtype, {shape.m, shape.n});
    fill_uniform(all, 1, 2, 0, comm.stream());
    fill_uniform(w, 1, 3, 0, comm.stream());
    AgGemm ag(comm, lt, shape);
    GemmRs rs(comm, lt, shape);
    tried +=
        try_candidates(comm, ag, {all.rows(local.begin, local.count), w, out}, true, gather_spans) +
        try_candidates(comm, rs, {all, w, out.rows(0, local.count)}, false, scatter_spans);
  });
  if (tried == 0) GTEST_SKIP() << "no kernel of this build records (TANDEM_DEVICE_TIMELINE)";
}

TEST_P(Timeline, ClocksAreReadInStreamOrder) {
  run([](GpuCommunicator& comm) {
    const DeviceMemory first(sizeof(uint64_t)), second(sizeof(uint64_t)), step(sizeof(uint64_t));
    launch_timestamp(reinterpret_cast<uint64_t*>(first.data()), comm.stream());
    launch_pause(50000, comm.stream());
    launch_timestamp(reinterpret_cast<uint64_t*>(second.data()), comm.stream());
    launch_timer_step(reinterpret_cast<uint64_t*>(step.data()), comm.stream());
    comm.synchronize();
    EXPECT_GE(read_word(comm, second) - read_word(comm, first), 49000u);
    EXPECT_GT(read_word(comm, step), 0u);
    EXPECT_LE(read_word(comm, step), 10000u);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Timeline, testing::Values(2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
