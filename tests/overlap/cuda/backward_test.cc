// Backward passes on GPU ranks: the weight gradient by every candidate, the saved gather, and
// forward, input gradient and weight gradient of both GEMMs through the public operators, against
// exact products; repeated, captured, and under random delays.
#include <fmt/format.h>

#include <functional>
#include <memory>
#include <vector>

#include "comm/device/signal_kernels.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/ag_wgrad/cuda/ag_wgrad.h"
#include "tandem/overlap.h"
#include "tandem/random.h"
#include "tests/comm/cuda/digests.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/cuda/matrix.h"
#include "tests/overlap/cuda/strategy_roundings.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Backward : public OnGpus {};

constexpr uint64_t kSeed = 11;
// Streams of random numbers. A rank's data uses stream base + rank.
constexpr uint64_t kX = 100, kWeight = 200, kGradient = 300, kSharded = 400;
constexpr int kRepeats = 3;

struct Sizes {
  int64_t m, n, k;  // n: this rank's
};

/// This rank's rows of x, its whole dy, and dw, from streams kX + call and kGradient + 10 rank +
/// call.
struct WgradOperands {
  WgradOperands(GpuCommunicator& comm, const OpDesc& s, uint64_t call)
      : local(shard_of(s.m, comm.size(), comm.rank())),
        x(s.dtype, local.count, s.k),
        dy(s.dtype, s.m, s.n) {
    fill_uniform(x.tensor, kSeed, kX + call, local.begin * s.k, comm.stream());
    fill_uniform(dy.tensor, kSeed, kGradient + 10 * uint64_t(comm.rank()) + call, 0, comm.stream());
  }
  Shard local;
  Matrix x, dy;
};

Matrix weight_gradient(const OpDesc& s) {
  return s.weight_kn ? Matrix(DType::f32, s.k, s.n) : Matrix(DType::f32, s.n, s.k);
}

/// Reference dw after `calls` calls that start from zero.
ProductReference wgrad_reference(const GpuCommunicator& comm, const OpDesc& s, int calls) {
  const uint64_t dy = kGradient + 10 * uint64_t(comm.rank());
  return {.seed = kSeed,
          .x_stream = s.weight_kn ? kX : dy,
          .w_stream = s.weight_kn ? dy : kX,
          .terms = calls,
          .k = s.m,
          .first_row = 0,
          .dtype = s.dtype,
          .x_is_km = true,
          .w_is_kn = true};
}

void clear(const Tensor& tensor, cudaStream_t stream) {
  gpu::check(cudaMemsetAsync(tensor.data(), 0, tensor.bytes(), stream), "clear");
}

TEST_P(Backward, WeightGradientMatchesReferenceByEveryCandidate) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const Sizes& size :
           {Sizes{513, 136, 72}, Sizes{192, 24, 64}, Sizes{33, 24, 40}, Sizes{7, 8, 8},
            Sizes{2, 16, 8}, Sizes{0, 8, 16}, Sizes{2049, 136, 8192}}) {
        for (const bool kn : {false, true}) {
          const OpDesc shape{size.m, size.n, size.k, dtype, kn};
          gpu::AgWgrad op(comm, lt, shape);
          const WgradOperands first(comm, shape, 0), second(comm, shape, 1);
          const Matrix dw = weight_gradient(shape);
          for (const Candidate& candidate : candidates_of(op)) {
            const std::string what =
                fmt::format("{} M {} N {} K {} {} {} of {}", candidate.name, size.m, size.n, size.k,
                            tandem::name_of(dtype), kn ? "kn" : "nk", comm.size());
            std::vector<uint64_t> digests;
            for (int i = 0; i < kRepeats; ++i) {
              clear(dw.tensor, comm.stream());
              candidate.run({first.x.tensor, first.dy.tensor, dw.tensor});
              candidate.run({second.x.tensor, second.dy.tensor, dw.tensor});
              digests.push_back(digest(dw.tensor, comm.stream()));
            }
            expect_right(comm, dw.tensor, wgrad_reference(comm, shape, 2), what);
            clear(dw.tensor, comm.stream());
            candidate.run({first.x.tensor, first.dy.tensor, dw.tensor});
            const uint64_t added = digest(dw.tensor, comm.stream());
            for (int i = 0; i < kRepeats; ++i) {  // the last of them as a graph
              poison(dw.tensor, comm.stream());
              candidate.run({.x = first.x.tensor,
                             .weight = first.dy.tensor,
                             .out = dw.tensor,
                             .accumulate = false});
              EXPECT_EQ(digest(dw.tensor, comm.stream()), added) << what << " stored";
            }
            EXPECT_EQ(digests, std::vector<uint64_t>(kRepeats, digests[0])) << what;
          }
        }
      }
    }
  });
}

TEST_P(Backward, EveryCandidateSavesTheWholeGather) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const Sizes& size :
         {Sizes{256 * comm.size(), 64, 64}, Sizes{37, 24, 40}, Sizes{2, 16, 8}}) {
      OpDesc shape{size.m, size.n, size.k};
      shape.keep_gathered = true;
      gpu::AgGemm op(comm, lt, shape);
      const Shard local = shard_of(size.m, comm.size(), comm.rank());
      const Matrix x(DType::bf16, local.count, size.k), whole(DType::bf16, size.m, size.k),
          weight(DType::bf16, size.n, size.k), out(DType::bf16, size.m, size.n);
      const uint64_t of_weight = kWeight + uint64_t(comm.rank());
      fill_uniform(weight.tensor, kSeed, of_weight, 0, comm.stream());
      for (const Candidate& candidate : candidates_of(op)) {
        const std::string what = fmt::format("{} M {} of {}", candidate.name, size.m, comm.size());
        for (uint64_t call = 0; call < kRepeats; ++call) {
          fill_uniform(x.tensor, kSeed, kX + call, local.begin * size.k, comm.stream());
          fill_uniform(whole.tensor, kSeed, kX + call, 0, comm.stream());
          poison(op.gathered(), comm.stream());
          poison(out.tensor, comm.stream());
          if ((int(call) + comm.rank()) % 2 == 0) launch_pause(30000, comm.stream());
          candidate.run({x.tensor, weight.tensor, out.tensor});
          EXPECT_EQ(digest(op.gathered(), comm.stream()), digest(whole.tensor, comm.stream()))
              << what;
          expect_right(comm, out.tensor, {kSeed, kX + call, of_weight, 1, size.k, 0, DType::bf16},
                       what);
        }
      }
    }
  });
}

// One pass: forward, input gradient and weight gradient of both GEMMs. The layer is y =
// all-gather(x) w^T, z = reduce-scatter(y v^T). y, dy and dz are drawn independently, so each GEMM
// has an exact reference.
class Pass {
 public:
  Pass(GpuCommunicator& comm, const Sizes& s, DType dtype, const OverlapOptions& options,
       const std::string& what)
      : comm_(comm), s_(s), dtype_(dtype), options_(options), what_(what) {}

  void column_parallel() {
    const Matrix x = rows_of(kX, s_.k), w = per_rank(kWeight, s_.n, s_.k),
                 dy = per_rank(kGradient, s_.m, s_.n), y(dtype_, s_.m, s_.n),
                 dx(dtype_, local_.count, s_.k), dw(DType::f32, s_.n, s_.k);
    tandem::AgGemm forward(comm_, {s_.m, s_.n, s_.k, dtype_, true}, options_);
    GemmRs of_input(comm_, {s_.m, s_.k, s_.n, dtype_, false, true}, options_);
    tandem::AgWgrad of_weight(comm_, {s_.m, s_.n, s_.k, dtype_}, options_);
    check("ag_gemm", y.tensor, {kSeed, kX, kWeight + rank_, 1, s_.k, 0, dtype_},
          [&] { forward.run(x.tensor, w.tensor, y.tensor); });
    check_gathered(forward.gathered(), kX, s_.k);
    check("its dx", dx.tensor,
          {.seed = kSeed,
           .x_stream = kGradient,
           .w_stream = kWeight,
           .terms = comm_.size(),
           .k = s_.n,
           .first_row = local_.begin,
           .dtype = dtype_,
           .w_is_kn = true},
          [&] { of_input.run(dy.tensor, w.tensor.transposed(), dx.tensor); });
    check(
        "its dw", dw.tensor, gradient_reference(kGradient + rank_, kX),
        [&] { of_weight.run(x.tensor, dy.tensor, dw.tensor); }, true);
  }

  void row_parallel() {
    const Matrix y = per_rank(kX, s_.m, s_.n), v = per_rank(kWeight, s_.k, s_.n),
                 dz = rows_of(kSharded, s_.k), z(dtype_, local_.count, s_.k),
                 dy(dtype_, s_.m, s_.n), dv(DType::f32, s_.k, s_.n);
    GemmRs forward(comm_, {s_.m, s_.k, s_.n, dtype_}, options_);
    tandem::AgGemm of_input(comm_, {s_.m, s_.n, s_.k, dtype_, true, false, true}, options_);
    tandem::AgWgrad of_weight(comm_, {s_.m, s_.n, s_.k, dtype_, false, false, true}, options_);
    check("gemm_rs", z.tensor, {kSeed, kX, kWeight, comm_.size(), s_.n, local_.begin, dtype_},
          [&] { forward.run(y.tensor, v.tensor, z.tensor); });
    check("its dx", dy.tensor,
          {.seed = kSeed,
           .x_stream = kSharded,
           .w_stream = kWeight + rank_,
           .terms = 1,
           .k = s_.k,
           .first_row = 0,
           .dtype = dtype_,
           .w_is_kn = true},
          [&] { of_input.run(dz.tensor, v.tensor.transposed(), dy.tensor); });
    check_gathered(of_input.gathered(), kSharded, s_.k);
    check(
        "its dw", dv.tensor, gradient_reference(kSharded, kX + rank_),
        [&] { of_weight.run(dz.tensor, y.tensor, dv.tensor.transposed()); }, true);
  }

 private:
  Matrix filled(uint64_t stream, int64_t first_row, int64_t rows, int64_t columns) {
    Matrix matrix(dtype_, rows, columns);
    fill_uniform(matrix.tensor, kSeed, stream, first_row * columns, comm_.stream());
    return matrix;
  }
  Matrix per_rank(uint64_t streams, int64_t rows, int64_t columns) {
    return filled(streams + rank_, 0, rows, columns);
  }
  /// This rank's rows of the global matrix.
  Matrix rows_of(uint64_t stream, int64_t columns) {
    return filled(stream, local_.begin, local_.count, columns);
  }
  ProductReference gradient_reference(uint64_t of_output, uint64_t of_input) const {
    return {.seed = kSeed,
            .x_stream = of_output,
            .w_stream = of_input,
            .terms = 1,
            .k = s_.m,
            .first_row = 0,
            .dtype = dtype_,
            .x_is_km = true,
            .w_is_kn = true};
  }
  void check(const std::string& which, const Tensor& out, const ProductReference& reference,
             const std::function<void()>& run, bool adds = false) {
    std::vector<uint64_t> digests;
    for (int i = 0; i < kRepeats; ++i) {
      if (adds) {
        clear(out, comm_.stream());
      } else {
        poison(out, comm_.stream());
      }
      run();
      digests.push_back(digest(out, comm_.stream()));
    }
    expect_right(comm_, out, reference, which + " " + what_, candidate_of(options_.strategy));
    EXPECT_EQ(digests, std::vector<uint64_t>(kRepeats, digests[0])) << which << " " << what_;
  }
  void check_gathered(const Tensor& whole_x, uint64_t stream, int64_t columns) {
    const Matrix whole = filled(stream, 0, s_.m, columns);
    EXPECT_EQ(digest(whole_x, comm_.stream()), digest(whole.tensor, comm_.stream()))
        << "gathered " << what_;
  }

  GpuCommunicator& comm_;
  Sizes s_;
  DType dtype_;
  OverlapOptions options_;
  std::string what_;
  uint64_t rank_ = uint64_t(comm_.rank());
  Shard local_ = shard_of(s_.m, comm_.size(), comm_.rank());
};

TEST_P(Backward, ForwardAndGradientsMatchReference) {
  run([](GpuCommunicator& comm) {
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped, Strategy::automatic}) {
      if (strategy == Strategy::overlapped && comm.size() == 1) continue;
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        // Timing candidates does not depend on the dtype.
        if (strategy == Strategy::automatic && dtype != DType::bf16) continue;
        for (const Sizes& size :
             {Sizes{37, 24, 40}, Sizes{48, 16, 24}, Sizes{2, 8, 16}, Sizes{0, 16, 8}}) {
          Pass pass(comm, size, dtype, {strategy, 0},
                    fmt::format("{} {} M {} N {} K {} of {}", name_of(strategy), name_of(dtype),
                                size.m, size.n, size.k, comm.size()));
          pass.column_parallel();
          pass.row_parallel();
        }
      }
    }
  });
}

TEST_P(Backward, CapturedWeightGradientReplays) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape{97, 64, 64};
    gpu::AgWgrad op(comm, lt, shape);
    auto candidates = candidates_of(op);
    if (candidates.size() > 1) candidates.erase(candidates.begin());  // NCCL's
    const WgradOperands o(comm, shape, 0);
    std::vector<Matrix> gradients;
    for (size_t i = 0; i < candidates.size(); ++i) gradients.push_back(weight_gradient(shape));
    comm.synchronize();
    const CapturedCalls graph(comm, [&] {
      for (size_t i = 0; i < candidates.size(); ++i) {
        clear(gradients[i].tensor, comm.stream());
        candidates[i].run({o.x.tensor, o.dy.tensor, gradients[i].tensor});
      }
    });
    constexpr int kReplays = 50;
    const size_t each = gradients.size();
    Digests digests(comm, each * kReplays);
    for (int i = 0; i < kReplays; ++i) {
      for (const Matrix& dw : gradients) poison(dw.tensor, comm.stream());
      if ((i + comm.rank()) % 5 == 0) launch_pause(20000, comm.stream());
      graph.launch();
      for (const Matrix& dw : gradients) digests.add(dw.tensor);
    }
    const std::vector<uint64_t> replayed = digests.take();
    for (size_t i = each; i < replayed.size(); ++i) {
      ASSERT_EQ(replayed[i], replayed[i % each]) << "replay " << i / each;
    }
    for (const Matrix& dw : gradients) {
      expect_right(comm, dw.tensor, wgrad_reference(comm, shape, 1), "replayed");
    }
  });
}

TEST_P(Backward, CallsAlternateUnderRandomDelays) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    struct StressCase {
      StressCase(GpuCommunicator& c, const LtContext& context, const OpDesc& s)
          : op(c, context, s),
            candidates(candidates_of(op)),
            operands(c, s, 0),
            dw(weight_gradient(s)),
            shape(s) {}
      gpu::AgWgrad op;
      std::vector<Candidate> candidates;
      WgradOperands operands;
      Matrix dw;
      OpDesc shape;
      std::vector<uint64_t> bits = std::vector<uint64_t>(8);  // by candidate
    };
    std::vector<std::unique_ptr<StressCase>> cases;
    for (const OpDesc& s : {OpDesc{256 * comm.size(), 136, 64}, OpDesc{41, 64, 256}}) {
      cases.push_back(std::make_unique<StressCase>(comm, lt, s));
    }
    OpDesc gathered_shape{1001, 8, 24};
    gathered_shape.keep_gathered = true;
    gpu::AgGemm keeps(comm, lt, gathered_shape, Strategy::serial);
    const Candidate keeping = candidate_of(keeps, "chunked");
    const WgradOperands whole_x(comm, gathered_shape, 0);
    const Matrix weight(DType::bf16, 8, 24), out(DType::bf16, 1001, 8),
        whole(DType::bf16, 1001, 24);
    fill_uniform(weight.tensor, kSeed, kWeight + uint64_t(comm.rank()), 0, comm.stream());
    fill_uniform(whole.tensor, kSeed, kX, 0, comm.stream());
    const uint64_t expected = digest(whole.tensor, comm.stream());
    // Three outputs a call: the gradient, the GEMM that saves its gather, and a copy of the saved
    // gather.
    constexpr size_t kInARow = 4;
    CallsInARow calls(comm, 3 * kInARow, size_t(64 * 256) * sizeof(float));
    struct Done {
      StressCase* stress_case;
      size_t candidate;
    };
    std::vector<Done> done;
    uint64_t product = 0;
    for (uint64_t i = 0; i < 300; ++i) {
      const auto draw = philox(1, 0, i);
      StressCase& stress_case = *cases[draw[0] % cases.size()];
      const size_t candidate = draw[1] % stress_case.candidates.size();
      const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
      if (delay < 20000) launch_pause(delay, comm.stream());
      const Tensor dw = calls.next(stress_case.dw.tensor);
      clear(dw, comm.stream());
      stress_case.candidates[candidate].run(
          {stress_case.operands.x.tensor, stress_case.operands.dy.tensor, dw});
      keeping.run({whole_x.x.tensor, weight.tensor, calls.next(out.tensor)});
      const Tensor copy = calls.next(whole.tensor), gathered = keeps.gathered();
      gpu::check(cudaMemcpyAsync(copy.data(), gathered.data(), gathered.bytes(), cudaMemcpyDefault,
                                 comm.stream()),
                 "copy a gather");
      done.push_back({&stress_case, candidate});
      if (!calls.full()) continue;
      const std::vector<uint64_t> now = calls.digests();
      for (size_t call = 0; call < done.size(); ++call) {
        const auto& [of, which] = done[call];
        const std::string what =
            fmt::format("behind call {}: {} {}", i, call, of->candidates[which].name);
        if (of->bits[which] == 0) {
          expect_right(comm, calls.out(3 * call), wgrad_reference(comm, of->shape, 1), what);
          of->bits[which] = now[3 * call];
        }
        ASSERT_EQ(now[3 * call], of->bits[which]) << what;
        if (product == 0) {
          expect_right(comm, calls.out(3 * call + 1),
                       {kSeed, kX, kWeight + uint64_t(comm.rank()), 1, 24, 0, DType::bf16}, what);
          product = now[3 * call + 1];
        }
        ASSERT_EQ(now[3 * call + 1], product) << what;
        ASSERT_EQ(now[3 * call + 2], expected) << what;
      }
      calls.begin_again();
      done.clear();
    }
  });
}

TEST_P(Backward, InvalidOperandsAreNamed) {
  run([](GpuCommunicator& comm) {
    EXPECT_THROW(tandem::AgWgrad(comm, {8, 9, 8}), InvalidArgument);
    EXPECT_THROW(tandem::AgWgrad(comm, {8, 8, 8, DType::u8}), InvalidArgument);
    tandem::AgWgrad op(comm, {8, 16, 8, DType::bf16}, {Strategy::serial, 0});
    const Shard local = shard_of(8, comm.size(), comm.rank());
    const Matrix x(DType::bf16, local.count, 8), dy(DType::bf16, 8, 16), dw(DType::f32, 16, 8),
        other(DType::f32, 8, 16), rounded(DType::bf16, 16, 8);
    EXPECT_THROW(op.run(x.tensor, dy.tensor, other.tensor), InvalidArgument);
    EXPECT_THROW(op.run(x.tensor, dy.tensor, other.tensor.transposed()), InvalidArgument);
    EXPECT_THROW(op.run(x.tensor, dy.tensor, rounded.tensor), InvalidArgument);
    EXPECT_THROW(op.run(dy.tensor, x.tensor, dw.tensor), InvalidArgument);
    tandem::AgGemm keeps_none(comm, {8, 16, 8, DType::bf16}, {Strategy::serial, 0});
    EXPECT_THROW(keeps_none.gathered(), InvalidArgument);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Backward, testing::Values(1, 2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
