// GEMM+AR followed by residual and RMSNorm: hidden against the exact product, out against the norm
// of that hidden. Every candidate x dtype x odd shapes on 1 to 4 GPUs, with equal bits on all
// ranks.
#include <fmt/format.h>

#include <memory>
#include <vector>

#include "bench/cuda/verify.h"
#include "comm/device/signal_kernels.h"
#include "kernels/cuda/add_norm.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "tandem/overlap.h"
#include "tandem/random.h"
#include "tests/comm/cuda/digests.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/cuda/matrix.h"

namespace tandem::test {
namespace {

using namespace gpu;

class AddNorms : public OnGpus {};

constexpr uint64_t kSeed = 7, kResidual = 500, kGain = 501;
constexpr float kEps = 1e-3f;

// Residual, gain and outputs of one call. `hidden` does not alias the residual.
struct Tail {
  Tail(GpuCommunicator& comm, DType dtype, int64_t m, int64_t n, uint64_t residual_stream)
      : residual(dtype, m, n), hidden(dtype, m, n), gain(dtype, {n}) {
    fill_uniform(residual.tensor, kSeed, residual_stream, 0, comm.stream());
    fill_uniform(gain.tensor, kSeed, kGain, 0, comm.stream());
  }
  AddNorm apart() const { return {residual.tensor, gain.tensor, hidden.tensor, kEps}; }
  AddNorm in_place() const { return {residual.tensor, gain.tensor, residual.tensor, kEps}; }
  Matrix residual, hidden, gain;
};

void expect_norm(GpuCommunicator& comm, const AddNorm& tail, const Tensor& out,
                 const std::string& what) {
  comm.synchronize();
  const Verdict verdict = verify_norm(out, tail.hidden, tail.gain, tail.eps, comm.stream());
  EXPECT_LE(verdict.of_bound, 1) << what << ": norm off by " << verdict.max_rel;
  EXPECT_EQ(verdict.not_finite, 0) << what << ": norm";
}

uint64_t digest_of(GpuCommunicator& comm, const AddNorm& tail, const Tensor& out) {
  return digest(out, comm.stream()) + 3 * digest(tail.hidden, comm.stream());
}

// One rank's operands of GEMM+AR, and the expected hidden.
struct Operands {
  Operands(GpuCommunicator& comm, const OpDesc& s)
      : reference(sum_reference(comm, s, false, kSeed)),
        x(s.dtype, s.m, s.k),
        weight(s.dtype, s.n, s.k),
        out(s.result(), s.m, s.n),
        x_scales(DType::f32, {s.scaled_by_row() ? s.m : 1}),
        weight_scales(DType::f32, {s.scaled_by_row() ? s.n : 1}),
        scales{x_scales.tensor, weight_scales.tensor},
        tail(comm, s.result(), s.m, s.n, kResidual),
        scaled(s.scaled()) {
    const uint64_t local = uint64_t(comm.rank());
    reference.scaling = s.scaling;
    reference.x_scales = 300;
    reference.w_scales = 400;
    reference.residual_stream = kResidual;
    fill_uniform(x.tensor, kSeed, reference.x_stream + local, 0, comm.stream());
    fill_uniform(weight.tensor, kSeed, reference.w_stream + local, 0, comm.stream());
    fill_scales(scales.x, kSeed, 300 + local, 0, comm.stream());
    fill_scales(scales.weight, kSeed, 400 + local, 0, comm.stream());
  }
  const Scales* given() const { return scaled ? &scales : nullptr; }
  ProductReference reference;
  Matrix x, weight, out, x_scales, weight_scales;
  Scales scales;
  Tail tail;
  bool scaled;
};

void expect_right(GpuCommunicator& comm, const Operands& o, std::string_view candidate,
                  const std::string& what) {
  const AddNorm tail = o.tail.apart();
  ProductReference reference = o.reference;
  reference.roundings = roundings_of(candidate, reference.terms);
  reference.sum_is_rounded = rounds_sum(candidate);
  comm.synchronize();
  const Verdict verdict =
      verify_product(tail.hidden, reference, tail.hidden.elements(), comm.stream());
  EXPECT_LE(verdict.of_bound, 1) << what << ": hidden off by " << verdict.max_rel;
  EXPECT_EQ(verdict.not_finite, 0) << what << ": hidden";
  expect_norm(comm, tail, o.out.tensor, what);
}

OpDesc dense(int64_t m, int64_t n, int64_t k, DType dtype) {
  OpDesc shape{m, n, k, dtype};
  shape.add_norm = true;
  return shape;
}

struct Shape3 {
  int64_t m, n, k;
};
// The widest rows exceed the registers of a block; the tallest matrix has several rows a block.
constexpr Shape3 kShapes[] = {{1, 8, 16},    {1, 8192, 32},  {2, 24, 40},    {3, 16400, 16},
                              {0, 16, 16},   {5, 4104, 64},  {16, 1000, 24}, {33, 136, 72},
                              {64, 2056, 8}, {130, 520, 48}, {256, 1032, 16}};

TEST_P(AddNorms, EveryCandidateMatchesReferenceOnOddShapes) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const auto try_shape = [&](const OpDesc& shape) {
      gpu::GemmAr op(comm, lt, shape);
      const Operands o(comm, shape);
      uint64_t ours = 0;
      for (const Candidate& candidate : candidates_of(op)) {
        const std::string what =
            fmt::format("{} M {} N {} K {} {} of {}", candidate.name, shape.m, shape.n, shape.k,
                        tandem::name_of(shape.dtype), comm.size());
        const AddNorm tail = o.tail.apart();
        std::vector<uint64_t> digests;
        for (int i = 0; i < 3; ++i) {
          poison(o.out.tensor, comm.stream());
          poison(tail.hidden, comm.stream());
          if ((i + comm.rank()) % 3 == 0) launch_pause(20000, comm.stream());
          candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, o.given(), &tail});
          digests.push_back(digest_of(comm, tail, o.out.tensor));
        }
        expect_right(comm, o, candidate.name, what);
        EXPECT_EQ(digests, std::vector<uint64_t>(3, digests[0])) << what;
        comm.require_same("bits of " + what, std::to_string(digests[0]));
        if (rounds_sum(candidate.name)) continue;
        EXPECT_TRUE(ours == 0 || ours == digests[0]) << what << ": not the other way's bits";
        ours = digests[0];
      }
    };
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const Shape3& s : kShapes) try_shape(dense(s.m, s.n, s.k, dtype));
    }
    OpDesc scaled = dense(33, 272, 48, DType::e4m3);
    for (const Scaling scaling : {Scaling::tensor, Scaling::row}) {
      scaled.scaling = scaling;
      try_shape(scaled);
    }
  });
}

TEST_P(AddNorms, InPlaceHiddenIsTheNextResidual) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape = dense(19, 264, 32, DType::bf16);
    gpu::GemmAr op(comm, lt, shape);
    for (const Candidate& candidate : candidates_of(op)) {
      const Operands o(comm, shape);
      const AddNorm apart = o.tail.apart(), in_place = o.tail.in_place();
      const auto call = [&](const AddNorm& tail) {
        candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, nullptr, &tail});
        return digest_of(comm, tail, o.out.tensor);
      };
      const uint64_t once = call(apart);
      const AddNorm again{apart.hidden, apart.gain, apart.hidden, kEps};
      const uint64_t twice = call(again);
      EXPECT_EQ(call(in_place), once) << candidate.name;
      EXPECT_EQ(call(in_place), twice) << candidate.name;
    }
  });
}

// All kernels that share one operator's slots and epochs, in random order, with and without a norm,
// on few and many blocks.
TEST_P(AddNorms, AllKindsOfCallsAlternateUnderRandomDelays) {
  if (ranks() == 1) GTEST_SKIP() << "nobody to wait for";
  run([](GpuCommunicator& comm) {
    constexpr int64_t kN = 1032;
    constexpr int64_t kRows[] = {1, 3, 100, 7};
    AllReduce op(comm, 100 * kN, DType::bf16, kN);
    std::vector<std::unique_ptr<Matrix>> in, out;
    std::vector<std::unique_ptr<Tail>> tails;
    const uint64_t world = uint64_t(comm.size());
    for (const int64_t rows : kRows) {
      in.push_back(std::make_unique<Matrix>(DType::bf16, rows, kN));
      out.push_back(std::make_unique<Matrix>(DType::bf16, rows, kN));
      // hidden is a sum over the ranks plus the residual.
      tails.push_back(std::make_unique<Tail>(comm, DType::bf16, rows, kN, 10 + world));
      fill_uniform(in.back()->tensor, kSeed, 10 + uint64_t(comm.rank()), 0, comm.stream());
    }
    // Two outputs a call: hidden, and the sum or the norm of hidden.
    constexpr size_t kInARow = 20;
    CallsInARow calls(comm, 2 * kInARow, size_t(100 * kN) * size_of(DType::bf16));
    std::vector<size_t> kinds;  // index into `calls`
    std::vector<uint64_t> bits(8), bits_of_hidden(8);
    for (uint64_t i = 0; i < 600; ++i) {
      const auto draw = philox(1, 0, i);
      const size_t which = draw[0] % 4;
      const AllReduceAlgorithm algorithm =
          draw[1] % 2 ? AllReduceAlgorithm::one_shot : AllReduceAlgorithm::two_shot;
      const bool norm = draw[2] % 2;
      const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
      if (delay < 20000) launch_pause(delay, comm.stream());
      const Tensor &from = in[which]->tensor, to = calls.next(out[which]->tensor);
      AddNorm tail = tails[which]->apart();
      tail.hidden = calls.next(tail.hidden);
      kinds.push_back(which * 2 + size_t(norm));
      if (norm) {
        op.run(from, to, algorithm, tail);
      } else {
        op.run(from, to, algorithm);
      }
      if (!calls.full()) continue;
      const std::vector<uint64_t> now = calls.digests();
      for (size_t call = 0; call < kinds.size(); ++call) {
        const size_t kind = kinds[call];
        const bool x_norm = kind % 2;
        const Tensor &out_now = calls.out(2 * call), &hidden = calls.out(2 * call + 1);
        const std::string what = fmt::format("behind call {}: {}", i, call);
        if (bits[kind] == 0) {
          const Verdict verdict =
              x_norm ? verify_sum(hidden, kSeed, 10, comm.size() + 1, comm.stream())
                     : verify_sum(out_now, kSeed, 10, comm.size(), comm.stream());
          EXPECT_LE(verdict.of_bound, 1) << what;
          EXPECT_EQ(verdict.not_finite, 0) << what;
          AddNorm right = tails[kind / 2]->apart();
          right.hidden = hidden;
          if (x_norm) expect_norm(comm, right, out_now, what);
          bits[kind] = now[2 * call];
          bits_of_hidden[kind] = now[2 * call + 1];
        }
        ASSERT_EQ(now[2 * call], bits[kind]) << what;
        // Without a norm the second output stays untouched.
        ASSERT_EQ(now[2 * call + 1], bits_of_hidden[kind]) << what;
      }
      calls.begin_again();
      kinds.clear();
    }
    comm.synchronize();
  });
}

TEST_P(AddNorms, CapturedGraphReplays) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape = dense(21, 520, 64, DType::bf16);
    gpu::GemmAr op(comm, lt, shape);
    for (const Candidate& candidate : candidates_of(op)) {
      const Operands o(comm, shape);
      const AddNorm tail = o.tail.apart();
      comm.synchronize();
      const CapturedCalls graph(comm, [&] {
        candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, nullptr, &tail});
      });
      constexpr int kReplays = 100;
      Digests digests(comm, 2 * kReplays);
      for (int i = 0; i < kReplays; ++i) {
        poison(o.out.tensor, comm.stream());
        poison(tail.hidden, comm.stream());
        if ((i + comm.rank()) % 5 == 0) launch_pause(20000, comm.stream());
        graph.launch();
        digests.add(o.out.tensor);
        digests.add(tail.hidden);
      }
      const std::vector<uint64_t> replayed = digests.take();
      for (size_t i = 2; i < replayed.size(); ++i) {
        ASSERT_EQ(replayed[i], replayed[i % 2]) << candidate.name << " replay " << i / 2;
      }
      expect_right(comm, o, candidate.name, fmt::format("{} replayed", candidate.name));
    }
  });
}

TEST_P(AddNorms, PublicOperatorAppliesNormAndRejectsInvalidArguments) {
  run([](GpuCommunicator& comm) {
    for (const DType dtype : {DType::bf16, DType::f32, DType::e4m3}) {
      const OpDesc shape = dense(37, 48, 80, dtype);
      for (const Strategy strategy :
           {Strategy::serial, Strategy::overlapped, Strategy::automatic}) {
        if (strategy == Strategy::overlapped && comm.size() == 1) continue;
        const Operands o(comm, shape);
        const AddNorm tail = o.tail.apart();
        tandem::GemmAr op(comm, {.m = 37, .n = 48, .k = 80, .dtype = dtype, .add_norm = true},
                          {strategy, 0});
        op.run(o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, o.given(), &tail);
        expect_right(comm, o,
                     kNccl,  // or a candidate of the strategy that rounds less
                     fmt::format("{} {}", name_of(strategy), tandem::name_of(dtype)));
      }
    }
    const Operands o(comm, dense(37, 48, 80, DType::bf16));
    tandem::GemmAr without_norm(comm, {.m = 37, .n = 48, .k = 80, .dtype = DType::bf16},
                                {Strategy::serial, 0});
    tandem::GemmAr op(comm, {.m = 37, .n = 48, .k = 80, .dtype = DType::bf16, .add_norm = true},
                      {Strategy::serial, 0});
    const auto refuses = [&](tandem::GemmAr& ar, const AddNorm* tail) {
      EXPECT_THROW(ar.run(o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, nullptr, tail),
                   InvalidArgument);
    };
    const AddNorm right = o.tail.apart();
    refuses(without_norm, &right);
    refuses(op, nullptr);
    const auto changed = [&](auto change) {
      AddNorm tail = right;
      change(tail);
      refuses(op, &tail);
    };
    changed([&](AddNorm& a) { a.residual = a.residual.rows(0, 36); });
    changed([&](AddNorm& a) { a.hidden = o.out.tensor; });
    changed([&](AddNorm& a) { a.gain = a.residual; });
    changed([&](AddNorm& a) { a.eps = -1; });
    std::vector<BFloat16> host(48);
    changed([&](AddNorm& a) { a.gain = Tensor(host.data(), DType::bf16, {48}); });
    op.run(o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, nullptr, &right);
    expect_right(comm, o, kNccl, "after errors");
  });
}

TEST_P(AddNorms, KernelSupportsAnyRowLength) {
  if (ranks() > 1) GTEST_SKIP() << "one GPU is enough";
  run([](GpuCommunicator& comm) {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const auto& [m, n] : {std::pair<int64_t, int64_t>{1, 8}, {300, 8192}, {2, 40008}}) {
        const Matrix sum(dtype, m, n), out(dtype, m, n);
        const Tail tail(comm, dtype, m, n, 11);
        const AddNorm apart = tail.apart();
        const std::string what = fmt::format("{} {} x {}", tandem::name_of(dtype), m, n);
        fill_uniform(sum.tensor, kSeed, 10, 0, comm.stream());
        for (const Tensor& made : {out.tensor, apart.hidden}) poison(made, comm.stream());
        launch_add_norm(sum.tensor, apart, out.tensor, comm.stream());
        EXPECT_LE(verify_sum(apart.hidden, kSeed, 10, 2, comm.stream()).of_bound, 1) << what;
        expect_norm(comm, apart, out.tensor, what);
        const uint64_t bits = digest_of(comm, apart, out.tensor);
        poison(apart.hidden, comm.stream());
        launch_add_norm(sum.tensor, apart, sum.tensor, comm.stream());  // in place over the sum
        EXPECT_EQ(digest_of(comm, apart, sum.tensor), bits) << what;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, AddNorms, testing::Values(1, 2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
