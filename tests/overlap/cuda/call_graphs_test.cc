// Operators that replay their calls as CUDA graphs: alternating operands and algorithms, more of
// them than the cache holds, operands whose values change or whose memory is freed, other streams,
// and callers that capture.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "bench/cuda/verify.h"
#include "comm/device/signal_kernels.h"
#include "core/cuda/graph.h"
#include "core/system/env.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/ag_wgrad/cuda/ag_wgrad.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/random.h"
#include "tests/comm/cuda/digests.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/core/cuda/renewed_memory.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/cuda/matrix.h"

namespace tandem::test {
namespace {

using namespace gpu;

class CallGraph : public OnGpus {};

enum class Kind { gather, scatter, gradient };

// Operands and output of one operator on one rank, with the output's reference.
struct Operands {
  Matrix x, weight, out;
  ProductReference reference;
};

Operands make_operands(Kind kind, const GpuCommunicator& comm, const OpDesc& s) {
  const int64_t local = shard_of(s.m, comm.size(), comm.rank()).count;
  if (kind == Kind::gradient) {
    return {Matrix(s.dtype, local, s.k), Matrix(s.dtype, s.m, s.n), Matrix(DType::f32, s.n, s.k),
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
  return {Matrix(s.dtype, gathers ? local : s.m, s.k), Matrix(s.dtype, s.n, s.k),
          Matrix(s.dtype, gathers ? s.m : local, s.n),
          gathers ? ag_reference(comm, s, 0) : sum_reference(comm, s, true, 0)};
}

// Writes new values at the same addresses.
void fill(Kind kind, const GpuCommunicator& comm, const OpDesc& s, Operands& o, const Tensor& x,
          uint64_t seed) {
  const auto rank = uint64_t(comm.rank());
  const int64_t first = shard_of(s.m, comm.size(), comm.rank()).begin * s.k;
  const bool sums = kind == Kind::scatter;
  o.reference.seed = seed;
  fill_uniform(x, seed, sums ? 100 + rank : 100, sums ? 0 : first, comm.stream());
  fill_uniform(o.weight.tensor, seed, (sums ? 201 : 200) + rank, 0, comm.stream());
}

void fill(Kind kind, const GpuCommunicator& comm, const OpDesc& s, Operands& o, uint64_t seed) {
  fill(kind, comm, s, o, o.x.tensor, seed);
}

void clear(Kind kind, const GpuCommunicator& comm, const Tensor& out) {
  if (kind != Kind::gradient) return poison(out, comm.stream());
  gpu::check(cudaMemsetAsync(out.data(), 0, out.bytes(), comm.stream()), "clear");
}

// Calls f with an operator of each kind, without fused candidates.
template <typename F>
void with_each(GpuCommunicator& comm, const OpDesc& shape, const F& f) {
  const LtContext lt;
  AgGemm gather(comm, lt, shape, Strategy::serial);
  f(gather, Kind::gather, "ag_gemm");
  GemmRs scatter(comm, lt, shape, Strategy::serial);
  f(scatter, Kind::scatter, "gemm_rs");
  AgWgrad gradient(comm, lt, shape);
  f(gradient, Kind::gradient, "ag_wgrad");
}

template <typename Op>
void alternate(GpuCommunicator& comm, Kind kind, const OpDesc& shape, const char* name) {
  const LtContext lt;
  Op op(comm, lt, shape);
  // A few of each family.
  std::vector<Candidate> candidates;
  for (const Candidate& candidate : candidates_of(op)) {
    const auto same = [&](const Candidate& other) { return other.family == candidate.family; };
    if (candidate.family.empty() || std::ranges::count_if(candidates, same) < 4)
      candidates.push_back(candidate);
  }
  std::vector<Operands> sets;
  for (uint64_t set = 0; set < 3; ++set) {
    sets.push_back(make_operands(kind, comm, shape));
    fill(kind, comm, shape, sets.back(), 3 + set);
  }
  // Few enough that the same operands, candidate and output recur and are replayed.
  constexpr size_t kInARow = 3;
  CallsInARow calls(comm, kInARow, size_t(sets[0].out.tensor.bytes()));
  std::vector<std::pair<size_t, size_t>> done;
  std::map<std::pair<size_t, size_t>, uint64_t> bits;
  for (uint64_t i = 0; i < 450; ++i) {
    const size_t set = philox(1, 0, i)[0] % 3;
    const size_t number = philox(1, 1, i)[0] % candidates.size();
    // A rank delayed on the host or the device must not stop the others from building their graphs.
    const uint32_t late = philox(2, uint64_t(comm.rank()), i)[0] % 100;
    if (late < 20) std::this_thread::sleep_for(std::chrono::microseconds(100 * late));
    if (late > 90) launch_pause(300000, comm.stream());
    const Tensor out = calls.next(sets[set].out.tensor);
    if (kind == Kind::gradient) clear(kind, comm, out);
    candidates[number].run({sets[set].x.tensor, sets[set].weight.tensor, out});
    done.emplace_back(set, number);
    if (!calls.full()) continue;
    const std::vector<uint64_t> now = calls.digests();
    for (size_t call = 0; call < now.size(); ++call) {
      const auto& [of, used] = done[call];
      const std::string& candidate = candidates[used].name;
      const std::string what =
          fmt::format("{} {}, operands {}, behind call {}: {}", name, candidate, of, i, call);
      uint64_t& first = bits[done[call]];
      if (first == 0) {
        expect_right(comm, calls.out(call), sets[of].reference, what, candidate);
        first = now[call];
      }
      ASSERT_EQ(now[call], first) << what;
    }
    calls.begin_again();
    done.clear();
  }
  for (const Candidate& candidate : candidates) {
    for (size_t set = 0; set < sets.size(); ++set) {
      fill(kind, comm, shape, sets[set], 20 + set);
      clear(kind, comm, sets[set].out.tensor);
      candidate.run({sets[set].x.tensor, sets[set].weight.tensor, sets[set].out.tensor});
      expect_right(comm, sets[set].out.tensor, sets[set].reference,
                   fmt::format("{} {} of new values", name, candidate.name), candidate.name);
    }
  }
}

TEST_P(CallGraph, OperandsAndCandidatesAlternate) {
  run([](GpuCommunicator& comm) {
    for (const int64_t m : {int64_t(37), int64_t(256 * comm.size())}) {
      const OpDesc shape{m, 264, 136};
      alternate<AgGemm>(comm, Kind::gather, shape, "ag_gemm");
      alternate<GemmRs>(comm, Kind::scatter, shape, "gemm_rs");
      alternate<AgWgrad>(comm, Kind::gradient, shape, "ag_wgrad");
    }
    const OpDesc added{512 * comm.size(), 264, 1032};
    alternate<GemmRs>(comm, Kind::scatter, added, "gemm_rs");
  });
}

TEST_P(CallGraph, MoreOutputsThanCachedGraphsMatchReference) {
  run([](GpuCommunicator& comm) {
    const OpDesc shape{24, 16, 40};
    with_each(comm, shape, [&](auto& op, Kind kind, const char* name) {
      const Candidate chunked = candidate_of(op, "chunked");
      Operands o = make_operands(kind, comm, shape);
      fill(kind, comm, shape, o, 3);
      const int64_t slots = int64_t(CallGraphs::kMaxGraphs) + 12;
      const int64_t rows = o.out.tensor.dim(0);
      const Matrix outs(o.out.tensor.dtype(), slots * rows, o.out.tensor.dim(1));
      const auto out_at = [&](int64_t slot) { return outs.tensor.rows(slot * rows, rows); };
      // Ascending order misses the cache each time; descending order captures the cached ones, then
      // replays them.
      for (int pass = 0; pass < 6; ++pass) {
        const std::string what = fmt::format("{} pass {}", name, pass);
        clear(kind, comm, outs.tensor);
        for (int64_t i = 0; i < slots; ++i) {
          const int64_t slot = pass < 2 || pass % 2 == 1 ? i : slots - 1 - i;
          chunked.run({o.x.tensor, o.weight.tensor, out_at(slot)});
        }
        const uint64_t first = digest(out_at(0), comm.stream());
        expect_right(comm, out_at(0), o.reference, what);
        for (int64_t slot = 1; slot < slots; ++slot) {
          ASSERT_EQ(digest(out_at(slot), comm.stream()), first) << what << " place " << slot;
        }
      }
    });
  });
}

// One allocation: operands differ in address only.
TEST_P(CallGraph, OperandsMayBeViewsOfOneAllocation) {
  run([](GpuCommunicator& comm) {
    const OpDesc shape{48 * comm.size(), 264, 136};
    with_each(comm, shape, [&](auto& op, Kind kind, const char* name) {
      constexpr int64_t kViews = 3;
      std::vector<Operands> sets;
      for (int64_t view = 0; view < kViews; ++view) {
        sets.push_back(make_operands(kind, comm, shape));
      }
      const int64_t rows = sets[0].x.tensor.dim(0);
      const Matrix xs(shape.dtype, kViews * rows, shape.k);
      const auto x_of = [&](int64_t view) { return xs.tensor.rows(view * rows, rows); };
      for (int64_t view = 0; view < kViews; ++view) {
        fill(kind, comm, shape, sets[size_t(view)], x_of(view), 3 + uint64_t(view));
      }
      for (const Candidate& candidate : candidates_of(op)) {
        for (int64_t i = 0; i < 4 * kViews; ++i) {
          const Operands& o = sets[size_t(i % kViews)];
          clear(kind, comm, o.out.tensor);
          candidate.run({x_of(i % kViews), o.weight.tensor, o.out.tensor});
          expect_right(comm, o.out.tensor, o.reference,
                       fmt::format("{} {} call {}", name, candidate.name, i), candidate.name);
        }
      }
    });
  });
}

// Frees x after the call that was replayed last; the new x often gets the same address.
void renew_x(GpuCommunicator& comm, const Candidate& candidate, Kind kind, const OpDesc& shape,
             From from, const std::string& name) {
  Operands o = make_operands(kind, comm, shape);
  RenewedMemory memory(from, size_t(o.x.tensor.bytes()));
  std::set<const void*> slots;
  constexpr uint64_t kRounds = 8;
  for (uint64_t round = 0; round < kRounds; ++round) {
    const Tensor x(memory.data(), shape.dtype, {o.x.tensor.dim(0), o.x.tensor.dim(1)},
                   {DeviceKind::cuda, comm.device()});
    fill(kind, comm, shape, o, x, 3 + round);
    slots.insert(x.data());
    for (int call = 0; call < 3; ++call) {
      clear(kind, comm, o.out.tensor);
      candidate.run({x, o.weight.tensor, o.out.tensor});
      expect_right(comm, o.out.tensor, o.reference,
                   fmt::format("{} {} of a {}, round {} call {}", name, candidate.name,
                               name_of(from), round, call),
                   candidate.name);
    }
    memory.renew();
  }
  EXPECT_LT(slots.size(), kRounds) << name << " of a " << name_of(from) << ": all addresses new";
}

void renew_operands(GpuCommunicator& comm, From from) {
  // Rows large enough for an allocation of their own, and small ones.
  for (const OpDesc& shape :
       {OpDesc{512 * comm.size(), 64, 4096}, OpDesc{48 * comm.size(), 264, 136}}) {
    with_each(comm, shape, [&](auto& op, Kind kind, const char* name) {
      for (const Candidate& candidate : candidates_of(op))
        renew_x(comm, candidate, kind, shape, from, name);
    });
  }
  const LtContext lt;
  OpDesc gathering{512 * comm.size(), 64, 4096};
  gathering.keep_gathered = true;
  const AgGemm op(comm, lt, gathering);
  const auto fused = candidates_of(op, "fused");
  const auto by_engine = std::ranges::find_if(
      fused, [&](const Candidate& candidate) { return op.pushes_by_engine(candidate); });
  if (by_engine == fused.end()) return;
  renew_x(comm, *by_engine, Kind::gather, gathering, from, "ag_gemm that keeps");
}

TEST_P(CallGraph, AllocatedOperandsMayBeFreed) {
  run([](GpuCommunicator& comm) { renew_operands(comm, From::allocation); });
}

TEST_P(CallGraph, PooledOperandsMayBeFreed) {
  run([](GpuCommunicator& comm) {
    for (const From from : {From::pool, From::trimmed_pool}) renew_operands(comm, from);
  });
}

TEST_P(CallGraph, MappedOperandsMayBeUnmapped) {
  run([](GpuCommunicator& comm) { renew_operands(comm, From::mapping); });
}

// Counts what call_graphs.h documents for each kind of Call.
TEST_P(CallGraph, EveryKindOfCallIsEnqueuedAndCapturedOnce) {
  run([](GpuCommunicator& comm) {
    constexpr size_t kBytes = size_t(4) << 20;
    const Matrix weight(DType::bf16, 1, 64), out(DType::bf16, 1, 64), bias(DType::bf16, 1, 64);
    RenewedMemory memory(From::allocation, kBytes);
    const auto x = [&] {
      return Tensor(memory.data(), DType::bf16, {1, kBytes / 2}, {DeviceKind::cuda, comm.device()});
    };
    CallGraphs graphs(comm);
    comm.prepare({});  // ranks that share a GPU capture nothing in advance
    int enqueued = 0;
    // Number of enqueues in five calls.
    const auto count = [&](const Tensor& copied, const Tensor* added, size_t candidate) {
      const int before = enqueued;
      for (int i = 0; i < 5; ++i) {
        graphs.run({candidate, {copied, weight.tensor, out.tensor, added}, {&copied}}, [&] {
          ++enqueued;
          poison(out.tensor, comm.stream());
        });
      }
      comm.synchronize();
      return enqueued - before;
    };
    EXPECT_EQ(count(x(), nullptr, 0), 2);
    EXPECT_EQ(count(x(), nullptr, 0), 0);
    EXPECT_EQ(count(x(), nullptr, 1), 2);
    EXPECT_EQ(count(x(), &bias.tensor, 0), 2);
    EXPECT_EQ(count(x(), nullptr, 0), 0);
    comm.set_deadline(comm.deadline() + 1);
    EXPECT_EQ(count(x(), nullptr, 0), 2);
    const void* before = memory.data();
    // One rank at a time: addresses are unique across all GPUs, so another rank could take this
    // one.
    for (int rank = 0; rank < comm.size(); ++rank) {
      for (int i = 0; rank == comm.rank() && i < 20; ++i) {
        memory.renew();  // may return memory that other ranks freed
        if (memory.data() == before) break;
      }
      comm.barrier("renewed");
    }
    EXPECT_EQ(count(x(), nullptr, 0), 2);
    EXPECT_EQ(memory.data(), before) << "not the address that was freed: nothing is shown";
    const std::vector<std::byte> on_host(64);
    const Tensor of_host(const_cast<std::byte*>(on_host.data()), DType::bf16, {1, 32},
                         {DeviceKind::cuda, comm.device()});
    EXPECT_EQ(count(of_host, nullptr, 0), 5);
    const cudaStream_t original = comm.stream();
    const Stream other(Priority::high);
    comm.set_stream(other.get());
    EXPECT_EQ(count(x(), nullptr, 0), 5);
    comm.set_stream(original);
    EXPECT_EQ(count(x(), nullptr, 0), 0);
  });
}

// More streams than hardware queues.
TEST_P(CallGraph, ManyOperatorsAreReplayed) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape{128 * comm.size(), 264, 136};
    constexpr size_t kOperators = 40;
    std::vector<std::unique_ptr<AgGemm>> gathers;
    std::vector<std::unique_ptr<GemmRs>> scatters;
    for (size_t i = 0; i < kOperators; ++i) {
      gathers.push_back(std::make_unique<AgGemm>(comm, lt, shape, Strategy::serial));
      scatters.push_back(std::make_unique<GemmRs>(comm, lt, shape, Strategy::serial));
    }
    Operands gathered = make_operands(Kind::gather, comm, shape);
    Operands scattered = make_operands(Kind::scatter, comm, shape);
    fill(Kind::gather, comm, shape, gathered, 3);
    fill(Kind::scatter, comm, shape, scattered, 4);
    // Each operator has its own outputs, so all calls can be enqueued back to back.
    const auto of_all = [&](const Operands& o) {
      return std::make_unique<Matrix>(shape.dtype, int64_t(kOperators) * o.out.tensor.dim(0),
                                      shape.n);
    };
    const auto all_gathered = of_all(gathered), all_scattered = of_all(scattered);
    const auto out_of = [&](const Matrix& all, size_t i) {
      const int64_t rows = all.tensor.dim(0) / int64_t(kOperators);
      return all.tensor.rows(int64_t(i) * rows, rows);
    };
    Digests digests(comm, 2 * kOperators);
    for (int pass = 0; pass < 5; ++pass) {
      for (const auto* all : {&all_gathered, &all_scattered}) poison((*all)->tensor, comm.stream());
      for (size_t i = 0; i < kOperators; ++i) {
        candidate_of(*gathers[i], "chunked")
            .run({gathered.x.tensor, gathered.weight.tensor, out_of(*all_gathered, i)});
        candidate_of(*scatters[i], "chunked")
            .run({scattered.x.tensor, scattered.weight.tensor, out_of(*all_scattered, i)});
      }
      for (const auto* all : {&all_gathered, &all_scattered}) {
        for (size_t i = 0; i < kOperators; ++i) digests.add(out_of(**all, i));
      }
      const std::string what = fmt::format("pass {}", pass);
      expect_right(comm, out_of(*all_gathered, 0), gathered.reference, what);
      expect_right(comm, out_of(*all_scattered, 0), scattered.reference, what);
      const std::vector<uint64_t> of_calls = digests.take();
      for (size_t i = 0; i < of_calls.size(); ++i) {
        ASSERT_EQ(of_calls[i], of_calls[i / kOperators * kOperators])
            << what << ", call " << i % kOperators;
      }
    }
  });
}

// A branch of the graph waits for the same flags as the next call.
TEST_P(CallGraph, CapturedFusedGemmRsMayAlternateWithCalls) {
  if (ranks() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape{512 * comm.size(), 1000, 1032};
    GemmRs op(comm, lt, shape);
    Operands o = make_operands(Kind::scatter, comm, shape);
    fill(Kind::scatter, comm, shape, o, 3);
    comm.synchronize();
    for (const Candidate& candidate : candidates_of(op, "fused")) {
      op.settle_on(candidate);
      const auto call = [&] {
        poison(o.out.tensor, comm.stream());
        candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor});
      };
      const CapturedCalls graph(comm, [&] { call(), call(); });
      for (int i = 0; i < 20; ++i) {
        if ((i + comm.rank()) % 3 == 0) launch_pause(400000, comm.stream());
        graph.launch();
        call();
        graph.launch();
        call();
        if (i % 4 == 0) {
          expect_right(comm, o.out.tensor, o.reference,
                       fmt::format("{}, round {}", candidate.name, i));
        }
      }
    }
  });
}

TEST_P(CallGraph, OtherStreamsAndCallerCapturesMatchReference) {
  run([](GpuCommunicator& comm) {
    const OpDesc shape{128 * comm.size(), 264, 136};
    with_each(comm, shape, [&](auto& op, Kind kind, const char* name) {
      Operands o = make_operands(kind, comm, shape);
      fill(kind, comm, shape, o, 3);
      comm.synchronize();
      const cudaStream_t original = comm.stream();
      const Stream other(Priority::high);
      const Candidate chunked = candidate_of(op, "chunked");
      const auto call = [&] {
        clear(kind, comm, o.out.tensor);
        chunked.run({o.x.tensor, o.weight.tensor, o.out.tensor});
      };
      const auto expect = [&](const char* what) {
        expect_right(comm, o.out.tensor, o.reference, fmt::format("{} {}", name, what));
      };
      for (const cudaStream_t stream : {original, other.get(), cudaStream_t{}, original}) {
        if (!stream && comm.shares_gpu()) {  // the ranks' calls would be serialized in it
          EXPECT_THROW(comm.set_stream(stream), InvalidArgument);
          continue;
        }
        comm.set_stream(stream);
        for (int i = 0; i < 3; ++i) {
          call();
          expect("on another stream");
        }
      }
      const CapturedCalls graph(comm, [&] { call(), call(); });
      for (int i = 0; i < 5; ++i) {
        graph.launch();
        call();
        graph.launch();
        expect("captured by the caller");
      }
      comm.set_deadline(comm.deadline() + 1);  // the deadline is part of a call's key
      call();
      expect("after another deadline");
    });
  });
}

TEST_P(CallGraph, ExceptionDuringCaptureLeavesTheStreamUsable) {
  run([](GpuCommunicator& comm) {
    EXPECT_THROW(Graph(comm.stream(), [] { throw InvalidArgument("no"); }), InvalidArgument);
    const Matrix word(DType::i32, 1, 1);
    poison(word.tensor, comm.stream());
    EXPECT_EQ(read<int>(comm, word.tensor), std::vector<int>{-1});
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, CallGraph, testing::Values(1, 2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
