// GEMM+RS's calls, which are replayed as graphs, and beside them those of operators whose calls are
// not: operands and ways that alternate, more of them than graphs are kept, operands whose values
// change, other streams, and callers that capture.
#include <fmt/format.h>

#include <chrono>
#include <map>
#include <thread>
#include <vector>

#include "comm/nccl/signal_kernels.h"
#include "core/cuda/graph.h"
#include "kernels/cuda/verify.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/ag_wgrad/cuda/ag_wgrad.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/random.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/gpu/matrix.h"

namespace tandem::test {
namespace {

using namespace gpu;

class CallGraph : public OnGpus {};

enum class Kind { gather, scatter, gradient };

// Operands of one operator on one rank, and what comes of them.
struct Operands {
  Matrix x, weight, out;
  ProductReference reference;
};

Operands make_operands(Kind kind, const NcclCommunicator& comm, const DenseShape& s) {
  const int64_t mine = shard_of(s.m, comm.size(), comm.rank()).count;
  if (kind == Kind::gradient) {
    return {Matrix(s.dtype, mine, s.k), Matrix(s.dtype, s.m, s.n), Matrix(DType::f32, s.n, s.k),
            ProductReference{.seed = 0,
                             .x_stream = 200 + uint64_t(comm.rank()),
                             .w_stream = 100,
                             .terms = 1,
                             .k = s.m,
                             .first_row = 0,
                             .dtype = s.dtype,
                             .x_is_km = true,
                             .w_is_kn = true}};
  }
  const bool gathers = kind == Kind::gather;
  return {Matrix(s.dtype, gathers ? mine : s.m, s.k), Matrix(s.dtype, s.n, s.k),
          Matrix(s.dtype, gathers ? s.m : mine, s.n),
          gathers ? ag_reference(comm, s, 0) : sum_reference(comm, s, true, 0)};
}

// New values in the same places.
void fill(Kind kind, const NcclCommunicator& comm, const DenseShape& s, Operands& o,
          uint64_t seed) {
  const auto rank = uint64_t(comm.rank());
  const int64_t first = shard_of(s.m, comm.size(), comm.rank()).begin * s.k;
  const bool sums = kind == Kind::scatter;
  o.reference.seed = seed;
  fill_uniform(o.x.tensor, seed, sums ? 100 + rank : 100, sums ? 0 : first, comm.stream());
  fill_uniform(o.weight.tensor, seed, (sums ? 201 : 200) + rank, 0, comm.stream());
}

void clear(Kind kind, const NcclCommunicator& comm, const Operands& o) {
  if (kind != Kind::gradient) return poison(o.out.tensor, comm.stream());
  gpu::check(cudaMemsetAsync(o.out.tensor.data(), 0, o.out.tensor.bytes(), comm.stream()), "clear");
}

template <typename Op>
void alternate(NcclCommunicator& comm, Kind kind, const DenseShape& shape, const char* name) {
  const LtContext lt;
  Op op(comm, lt, shape, Way::fused);
  std::vector<Operands> sets;
  for (uint64_t set = 0; set < 3; ++set) {
    sets.push_back(make_operands(kind, comm, shape));
    fill(kind, comm, shape, sets.back(), 3 + set);
  }
  std::map<std::pair<size_t, Way>, uint64_t> bits;
  const auto way_of = [&](uint64_t i) {
    const std::vector<Way> ways = op.ways();
    return ways[philox(1, 1, i)[0] % ways.size()];
  };
  for (uint64_t i = 0; i < 150; ++i) {
    const size_t set = philox(1, 0, i)[0] % 3;
    const Way way = way_of(i);
    const std::string what = fmt::format("{} {}, operands {}, call {}", name, name_of(way), set, i);
    // Whoever is late, on the host or on the device, the others' graphs are made meanwhile.
    const uint32_t late = philox(2, uint64_t(comm.rank()), i)[0] % 100;
    if (late < 20) std::this_thread::sleep_for(std::chrono::microseconds(100 * late));
    if (late > 90) launch_pause(300000, comm.stream());
    clear(kind, comm, sets[set]);
    op.run(way, sets[set].x.tensor, sets[set].weight.tensor, sets[set].out.tensor);
    if (i % 3 != 0) continue;
    const uint64_t now = digest(sets[set].out.tensor, comm.stream());
    uint64_t& before = bits[{set, way}];
    if (before == 0) expect_right(comm, sets[set].out.tensor, sets[set].reference, what);
    ASSERT_TRUE(before == 0 || before == now) << what;
    before = now;
  }
  for (const Way way : op.ways()) {
    for (size_t set = 0; set < sets.size(); ++set) {
      fill(kind, comm, shape, sets[set], 20 + set);
      clear(kind, comm, sets[set]);
      op.run(way, sets[set].x.tensor, sets[set].weight.tensor, sets[set].out.tensor);
      expect_right(comm, sets[set].out.tensor, sets[set].reference,
                   fmt::format("{} {} of new values", name, name_of(way)));
    }
  }
}

TEST_P(CallGraph, OperandsAndWaysAlternate) {
  run([](NcclCommunicator& comm) {
    for (const int64_t m : {int64_t(37), int64_t(256 * comm.size())}) {
      const DenseShape shape{m, 264, 136};
      alternate<AgGemm>(comm, Kind::gather, shape, "ag_gemm");
      alternate<GemmRs>(comm, Kind::scatter, shape, "gemm_rs");
      alternate<AgWgrad>(comm, Kind::gradient, shape, "ag_wgrad");
    }
    const DenseShape added{512 * comm.size(), 264, 1032};
    alternate<GemmRs>(comm, Kind::scatter, added, "gemm_rs");
  });
}

TEST_P(CallGraph, MoreOperandsThanAreKept) {
  run([](NcclCommunicator& comm) {
    const LtContext lt;
    const DenseShape shape{24, 16, 40};
    GemmRs op(comm, lt, shape, Way::chunked);
    Operands o = make_operands(Kind::scatter, comm, shape);
    fill(Kind::scatter, comm, shape, o, 3);
    const int64_t places = int64_t(CallGraphs::kKept) + 12;
    const int64_t rows = o.out.tensor.dim(0);
    const Matrix outs(shape.dtype, places * rows, shape.n);
    const auto out_at = [&](int64_t place) { return outs.tensor.rows(place * rows, rows); };
    // Upwards all are new each time; downwards those kept are captured, then replayed.
    for (int pass = 0; pass < 6; ++pass) {
      poison(outs.tensor, comm.stream());
      for (int64_t i = 0; i < places; ++i) {
        const int64_t place = pass < 2 || pass % 2 == 1 ? i : places - 1 - i;
        op.run(o.x.tensor, o.weight.tensor, out_at(place));
      }
      const uint64_t first = digest(out_at(0), comm.stream());
      expect_right(comm, outs.tensor.rows(0, rows), o.reference, fmt::format("pass {}", pass));
      for (int64_t place = 1; place < places; ++place) {
        ASSERT_EQ(digest(out_at(place), comm.stream()), first) << pass << " place " << place;
      }
    }
  });
}

// What is allocated next often gets the addresses of what was freed last.
TEST_P(CallGraph, OperandsMayBeFreed) {
  run([](NcclCommunicator& comm) {
    const LtContext lt;
    const DenseShape shape{96, 264, 136};
    GemmRs op(comm, lt, shape, Way::chunked);
    for (uint64_t round = 0; round < 6; ++round) {
      Operands o = make_operands(Kind::scatter, comm, shape);
      fill(Kind::scatter, comm, shape, o, 3 + round);
      for (int i = 0; i < 2; ++i) {
        poison(o.out.tensor, comm.stream());
        op.run(o.x.tensor, o.weight.tensor, o.out.tensor);
        expect_right(comm, o.out.tensor, o.reference, fmt::format("round {} call {}", round, i));
      }
    }
  });
}

TEST_P(CallGraph, OtherStreamsAndCapturingCallers) {
  run([](NcclCommunicator& comm) {
    const LtContext lt;
    const DenseShape shape{128 * comm.size(), 264, 136};
    GemmRs op(comm, lt, shape, Way::chunked);
    Operands o = make_operands(Kind::scatter, comm, shape);
    fill(Kind::scatter, comm, shape, o, 3);
    comm.synchronize();
    const cudaStream_t own = comm.stream();
    const Stream other(Priority::high);
    const auto call = [&] { op.run(o.x.tensor, o.weight.tensor, o.out.tensor); };
    for (const cudaStream_t stream : {own, other.get(), cudaStream_t{}, own}) {
      comm.set_stream(stream);
      for (int i = 0; i < 3; ++i) {
        poison(o.out.tensor, stream);
        call();
        expect_right(comm, o.out.tensor, o.reference, "on another stream");
      }
    }
    const Graph graph(own, [&] { call(), call(); });
    for (int i = 0; i < 5; ++i) {
      poison(o.out.tensor, own);
      graph.launch(own);
      call();
      graph.launch(own);
      expect_right(comm, o.out.tensor, o.reference, "captured by the caller");
    }
    comm.set_deadline(comm.deadline() + 1);  // another one is part of what a call is
    call();
    expect_right(comm, o.out.tensor, o.reference, "after another deadline");
  });
}

TEST_P(CallGraph, WhatThrowsWhileCapturedLeavesTheStreamUsable) {
  run([](NcclCommunicator& comm) {
    EXPECT_THROW(Graph(comm.stream(), [] { throw InvalidArgument("no"); }), InvalidArgument);
    const Matrix word(DType::i32, 1, 1);
    poison(word.tensor, comm.stream());
    comm.synchronize();
    int seen = 0;
    gpu::check(cudaMemcpy(&seen, word.tensor.data(), sizeof seen, cudaMemcpyDefault), "read");
    EXPECT_EQ(seen, -1);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, CallGraph, testing::Values(1, 2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
