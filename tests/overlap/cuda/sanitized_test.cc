// Runs each of our kernels a few times (several of the fused GEMM+AR), on the smallest shapes
// that reach all of its roles: short enough for compute-sanitizer (tools/gpu_sanitize.sh). Fused
// kernels have a suite of their own, since one tool may handle only the others. Results are
// checked, so the sanitized runs do real work.
#include <fmt/format.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/cuda/verify.h"
#include "codec/cuda/quantize.h"
#include "collectives/cuda/shard_exchange.h"
#include "core/system/env.h"
#include "kernels/cuda/add_norm.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/ag_gemm/cuda/encoded_ag.h"
#include "overlap/ag_wgrad/cuda/ag_wgrad.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "overlap/moe/cuda/layer.h"
#include "overlap/registry.h"
#include "overlap/scatter/cuda/encoded_rs.h"
#include "tandem/collectives.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/scaled_operands.h"
#include "tests/overlap/moe/cuda/gradient_problem.h"
#include "tests/overlap/moe/cuda/shapes.h"

namespace tandem::test {
namespace {

using namespace gpu;

constexpr double kDeadline_s = 60;  // kernels are slow under a sanitizer
constexpr int64_t kSamples = 64;
constexpr uint64_t kSeed = 3;

class Sanitized : public OnGpus {};
class SanitizedFused : public OnGpus {};

void expect_product(GpuCommunicator& comm, const Tensor& out, ProductReference reference,
                    const std::string& what, std::string_view candidate = "chunked") {
  comm.synchronize();
  reference.roundings = roundings_of(candidate, reference.terms);
  const Verdict verdict = verify_product(out, reference, kSamples, comm.stream());
  EXPECT_LE(verdict.of_bound, 1) << what;
  EXPECT_EQ(verdict.not_finite, 0) << what;
}

ScaledOperands ag_operands(GpuCommunicator& comm, const OpDesc& s) {
  return scaled_ag_operands(comm, s, kSeed);
}

ScaledOperands sum_operands(GpuCommunicator& comm, const OpDesc& s, bool scattered) {
  return scaled_sum_operands(comm, s, scattered, kSeed);
}

void try_candidates(GpuCommunicator& comm, const std::vector<Candidate>& candidates,
                    const ScaledOperands& o, const char* name) {
  EXPECT_GT(candidates.size(), 0u);
  for (const Candidate& candidate : candidates) {
    poison(o.out.tensor, comm.stream());
    candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, o.given()});
    expect_product(comm, o.out.tensor, o.reference, fmt::format("{} {}", name, candidate.name),
                   candidate.name);
  }
}

template <typename Op>
void try_family(GpuCommunicator& comm, const Op& op, const ScaledOperands& o,
                const char* family = "fused") {
  try_candidates(comm, candidates_of(op, family), o, family);
}

TEST_P(Sanitized, CollectiveKernels) {
  run(
      [](GpuCommunicator& comm) {
        // Rows of whole 16-byte vectors, and others; shards of several chunks per channel.
        for (const auto& [rows, columns] :
             std::vector<std::pair<int64_t, int64_t>>{{5, 1031}, {4, 3 << 19}}) {
          const Matrix whole(DType::bf16, rows, columns);
          const Matrix shard(DType::bf16, shard_of(rows, comm.size(), comm.rank()).count, columns);
          ShardExchange& exchange = shard_exchange(comm);
          for (const ShardAlgorithm algorithm :
               {ShardAlgorithm::one_shot, ShardAlgorithm::pipelined}) {
            if (!exchange.fits(whole.tensor, algorithm)) continue;
            fill_uniform(whole.tensor, kSeed, 10 + uint64_t(comm.rank()), 0, comm.stream());
            poison(shard.tensor, comm.stream());
            exchange.reduce_scatter(whole.tensor, shard.tensor, algorithm);
            poison(whole.tensor, comm.stream());
            exchange.all_gather(shard.tensor, whole.tensor, algorithm);
            EXPECT_LE(verify_sum(whole.tensor, kSeed, 10, comm.size(), comm.stream()).of_bound, 1);
          }
          fill_uniform(whole.tensor, kSeed, 10 + uint64_t(comm.rank()), 0, comm.stream());
          exchange.all_reduce(whole.tensor, whole.tensor);
          EXPECT_LE(verify_sum(whole.tensor, kSeed, 10, comm.size(), comm.stream()).of_bound, 1);
        }
        comm.synchronize();
      },
      kDeadline_s);
}

TEST_P(Sanitized, AllReduce) {
  run(
      [](GpuCommunicator& comm) {
        constexpr int64_t kRows = 5, kN = 4136;
        const uint64_t world = uint64_t(comm.size());
        for (const DType dtype : {DType::bf16, DType::f32}) {
          AllReduce op(comm, kRows * kN, dtype, kN);
          const Matrix in(dtype, kRows, kN), out(dtype, kRows, kN), residual(dtype, kRows, kN),
              hidden(dtype, kRows, kN), gain(dtype, {kN});
          fill_uniform(in.tensor, kSeed, 10 + uint64_t(comm.rank()), 0, comm.stream());
          fill_uniform(residual.tensor, kSeed, 10 + world, 0, comm.stream());
          fill_uniform(gain.tensor, kSeed, 40, 0, comm.stream());
          const AddNorm tail{residual.tensor, gain.tensor, hidden.tensor, 1e-5f};
          const auto expect_tail = [&] {
            EXPECT_LE(
                verify_norm(out.tensor, hidden.tensor, gain.tensor, 1e-5f, comm.stream()).of_bound,
                1);
          };
          for (const AllReduceAlgorithm algorithm :
               {AllReduceAlgorithm::one_shot, AllReduceAlgorithm::two_shot}) {
            poison(out.tensor, comm.stream());
            op.run(in.tensor, out.tensor, algorithm);
            EXPECT_LE(verify_sum(out.tensor, kSeed, 10, comm.size(), comm.stream()).of_bound, 1);
            for (const Matrix* made : {&out, &hidden}) poison(made->tensor, comm.stream());
            op.run(in.tensor, out.tensor, algorithm, tail);
            EXPECT_LE(verify_sum(hidden.tensor, kSeed, 10, comm.size() + 1, comm.stream()).of_bound,
                      1);
            expect_tail();
          }
          poison(hidden.tensor, comm.stream());
          launch_add_norm(in.tensor, tail, out.tensor, comm.stream());
          expect_tail();
        }
        comm.synchronize();
      },
      kDeadline_s);
}

TEST_P(Sanitized, EncodedCollectives) {
  run(
      [](GpuCommunicator& comm) {
        const Wire wire = Wire::parse("int4:g32");
        const double each = wire.error_bound();  // values are at most 1
        const int64_t world = comm.size(), rows = 20 * world, columns = 7000;
        const uint64_t rank = uint64_t(comm.rank());
        const Matrix in(DType::bf16, rows, columns), out(DType::bf16, rows, columns);
        const auto expect_sum = [&](const Tensor& of, double errors, int terms, const char* what) {
          const Verdict verdict = verify_sum(of, kSeed, 10, terms, comm.stream());
          EXPECT_LE(verdict.max_rel, errors * each + 0x1p-7) << what;
          EXPECT_EQ(verdict.not_finite, 0) << what;
        };
        for (const int64_t some : {int64_t(1), rows}) {  // at once, and in tiles
          const Tensor data = out.tensor.rows(0, some);
          fill_uniform(data, kSeed, 10 + rank, 0, comm.stream());
          all_reduce(comm, data, wire);
          expect_sum(data, double(world) * (2 + each), int(world), "all_reduce");
        }
        // Shard p of each rank's input restarts the stream: every shard has the same sum.
        const auto rows_of_rank = [&](const Matrix& of, int64_t p) {
          return of.tensor.rows(20 * p, 20);
        };
        for (int64_t p = 0; p < world; ++p) {
          fill_uniform(rows_of_rank(in, p), kSeed, 10 + rank, 0, comm.stream());
        }
        const Tensor local = rows_of_rank(out, comm.rank());
        reduce_scatter(comm, in.tensor, local, wire);
        expect_sum(local, double(world), int(world), "reduce_scatter");
        fill_uniform(local, kSeed, 10, 0, comm.stream());
        all_gather(comm, local, out.tensor, wire);
        for (int64_t p = 0; p < world; ++p) expect_sum(rows_of_rank(out, p), 1, 1, "all_gather");
        const std::vector<int64_t> counts(size_t(world), 20);
        for (int64_t p = 0; p < world; ++p)
          fill_uniform(rows_of_rank(in, p), kSeed, 10, 0, comm.stream());
        all_to_all(comm, in.tensor, counts, out.tensor, counts, wire);
        for (int64_t p = 0; p < world; ++p) expect_sum(rows_of_rank(out, p), 1, 1, "all_to_all");
        comm.synchronize();
      },
      kDeadline_s);
}

TEST_P(Sanitized, OperatorsWithoutFusedKernels) {
  run(
      [](GpuCommunicator& comm) {
        const LtContext lt;
        const OpDesc shape{34, 24, 40};
        gpu::AgGemm ag(comm, lt, shape, Strategy::serial);
        try_candidates(comm, candidates_of(ag), ag_operands(comm, shape), "ag_gemm");
        gpu::GemmRs rs(comm, lt, shape, Strategy::serial);
        try_candidates(comm, candidates_of(rs), sum_operands(comm, shape, true), "gemm_rs");
        gpu::AgWgrad wgrad(comm, lt, shape);
        const ScaledOperands o = ag_operands(comm, shape);
        const Matrix dy(shape.dtype, shape.m, shape.n), dw(DType::f32, shape.n, shape.k);
        fill_uniform(dy.tensor, kSeed, 50, 0, comm.stream());
        const ProductReference gradient{.seed = kSeed,
                                        .x_stream = 50,
                                        .w_stream = o.reference.x_stream,
                                        .terms = 1,
                                        .k = shape.m,
                                        .first_row = 0,
                                        .dtype = shape.dtype,
                                        .x_is_km = true,
                                        .w_is_kn = true};
        for (const Candidate& candidate : candidates_of(wgrad)) {
          gpu::check(cudaMemsetAsync(dw.tensor.data(), 0, dw.tensor.bytes(), comm.stream()),
                     "clear");
          candidate.run({o.x.tensor, dy.tensor, dw.tensor});
          expect_product(comm, dw.tensor, gradient, "ag_wgrad " + candidate.name);
        }
      },
      kDeadline_s);
}

TEST_P(Sanitized, ScaledRows) {
  run(
      [](GpuCommunicator& comm) {
        const LtContext lt;
        const Matrix x(DType::bf16, 9, 48), codes(DType::e4m3, 9, 48), scales(DType::f32, {9});
        fill_uniform(x.tensor, kSeed, 1, 0, comm.stream());
        launch_quantize_rows(x.tensor, codes.tensor, scales.tensor, comm.stream());
        const Matrix weight(DType::e4m3, 32, 48), weight_scales(DType::f32, {32}),
            out(DType::bf16, 9, 32);
        fill_uniform(weight.tensor, kSeed, 2, 0, comm.stream());
        fill_scales(weight_scales.tensor, kSeed, 3, 0, comm.stream());
        OpDesc shape{9, 32, 48, DType::e4m3};
        shape.scaling = Scaling::row;
        const ScaledGemm gemm(lt, product_of(shape, 9, false), GemmAlgorithm::widened);
        gemm.run(codes.tensor.data(), weight.tensor.data(), out.tensor.data(), nullptr,
                 comm.stream(),
                 {scales.tensor.as<const float>(), weight_scales.tensor.as<const float>()});
        comm.synchronize();
      },
      kDeadline_s);
}

TEST_P(SanitizedFused, AgGemm) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run(
      [](GpuCommunicator& comm) {
        const LtContext lt;
        // The second shape splits each tile along K, with two helpers on two GPUs.
        for (const OpDesc& shape :
             {OpDesc{256 * comm.size(), 200, 192}, OpDesc{128 * comm.size(), 264, 3072}}) {
          gpu::AgGemm op(comm, lt, shape);
          try_family(comm, op, ag_operands(comm, shape));
        }
      },
      kDeadline_s);
}

TEST_P(SanitizedFused, GemmRs) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run(
      [](GpuCommunicator& comm) {
        const LtContext lt;
        for (const DType dtype : {DType::bf16, DType::f16}) {
          // In the second shape a block has several tiles, including local ones.
          for (const OpDesc& shape : {OpDesc{256 * comm.size(), 200, 192, dtype},
                                      OpDesc{1536 * comm.size(), 3080, 64, dtype}}) {
            gpu::GemmRs op(comm, lt, shape);
            try_family(comm, op, sum_operands(comm, shape, true), "fused_cutlass");
          }
        }
      },
      kDeadline_s);
}

TEST_P(SanitizedFused, GemmRsFusedArrivals) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run(
      [](GpuCommunicator& comm) {
        const LtContext lt;
        // More tiles than clusters: a tile is sent during the next one's GEMM, with local tiles in
        // between.
        const OpDesc shape{2304 * comm.size(), 2048, 520};
        gpu::GemmRs op(comm, lt, shape);
        try_family(comm, op, sum_operands(comm, shape, true));
      },
      kDeadline_s);
}

TEST_P(SanitizedFused, Fp8) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run(
      [](GpuCommunicator& comm) {
        const LtContext lt;
        // The second shape splits tiles along K.
        for (const auto& [m, n, k] : {std::array<int64_t, 3>{2304, 1040, 528}, {256, 5376, 4960}}) {
          OpDesc shape{m * comm.size(), n, k, DType::e4m3};
          shape.scaling = Scaling::row;
          gpu::AgGemm ag(comm, lt, shape);
          try_family(comm, ag, ag_operands(comm, shape));
          gpu::GemmRs rs(comm, lt, shape);
          try_family(comm, rs, sum_operands(comm, shape, true));
        }
      },
      kDeadline_s);
}

// All candidates, fused or not.
TEST_P(SanitizedFused, Moe) {
  run(
      [](GpuCommunicator& comm) {
        // The second shape sends sums in groups of columns.
        for (const int64_t hidden : {72, 520}) {
          const MoeShape shape = two_experts_each(comm, 140, hidden);
          MoeOnGpus layer(comm, shape, {}, Choosing::first, true);
          MoeCase problem(comm, shape);
          problem.route({.imbalance = 0}, 1);
          for (size_t algorithm = 0; algorithm < layer.candidates().size(); ++algorithm) {
            problem.poison();
            layer.run(algorithm, problem.x(), problem.routing(), problem.w_in, problem.w_out,
                      problem.out());
            problem.expect_right(problem.result<uint16_t>(), layer.candidates()[algorithm].name);
          }
        }
      },
      kDeadline_s);
}

TEST_P(SanitizedFused, MoeOverWireFormats) {
  run(
      [](GpuCommunicator& comm) {
        for (const char* wire : {"int8", "int4:g32"}) {
          const MoeShape shape = two_experts_each(comm, 140, 520);
          const MoeOptions options{.dispatch = Wire::parse(wire), .combine = Wire::parse(wire)};
          MoeOnGpus layer(comm, shape, options, Choosing::first);
          MoeCase problem(comm, shape);
          problem.route({.imbalance = 0}, 1);
          std::vector<uint16_t> bits;
          for (size_t algorithm = 0; algorithm < layer.candidates().size(); ++algorithm) {
            problem.poison();
            layer.run(algorithm, problem.x(), problem.routing(), problem.w_in, problem.w_out,
                      problem.out());
            const auto found = problem.result<uint16_t>();
            if (algorithm == 0) bits = found;
            EXPECT_EQ(found, bits) << layer.candidates()[algorithm].name;
          }
        }
      },
      kDeadline_s);
}

// Kernels compiled for an emulated link.
TEST_P(SanitizedFused, MoeOnAnEmulatedLink) {
  run_gpus({ranks(), EmulatedLink{5e9, 5e-6}, kDeadline_s, ranks()}, [](Communicator& of) {
    GpuCommunicator& comm = as_gpu(of);
    const MoeShape shape = two_experts_each(comm, 140, 520);
    const Wire int8 = Wire::parse("int8");
    MoeOnGpus encoded(comm, shape, {.dispatch = int8, .combine = int8}, Choosing::first);
    MoeOnGpus layer(comm, shape, {.backward = true}, Choosing::first);
    const auto saved = layer.make_saved();
    MoeGradientCase p(comm, shape);
    p.route({.imbalance = 0}, 1);
    std::vector<uint16_t> bits;
    for (size_t algorithm = 0; algorithm < encoded.candidates().size(); ++algorithm) {
      p.poison();
      encoded.run(algorithm, p.x(), p.routing(), p.w_in, p.w_out, p.out());
      const auto found = p.result<uint16_t>();
      if (algorithm == 0) bits = found;
      EXPECT_EQ(found, bits) << encoded.candidates()[algorithm].name;
    }
    for (size_t algorithm = 0; algorithm < layer.candidates().size(); ++algorithm) {
      p.reset();
      layer.run(algorithm, p.x(), p.routing(), p.w_in, p.w_out, p.out(), saved.get());
      p.run_backward(layer, *saved, algorithm % layer.backward_candidates().size());
      p.expect_right(p.found(), layer.candidates()[algorithm].name);
    }
  });
}

TEST_P(SanitizedFused, MoeBackward) {
  run(
      [](GpuCommunicator& comm) {
        // Few rows an expert, and more than a tile.
        for (const int64_t tokens : {12, 140}) {
          const MoeShape shape{.tokens = tokens,
                               .hidden = 264,
                               .ffn = 72,
                               .experts = comm.size(),
                               .top_k = 1,
                               .dtype = DType::bf16};
          MoeOnGpus layer(comm, shape, {.backward = true}, Choosing::first);
          const auto saved = layer.make_saved();
          MoeGradientCase p(comm, shape);
          p.route({.imbalance = 0}, 1);
          for (const size_t algorithm : {size_t(0), layer.candidates().size() - 1}) {
            p.poison();
            p.reset();
            layer.run(algorithm, p.x(), p.routing(), p.w_in, p.w_out, p.out(), saved.get());
            p.run_backward(layer, *saved,
                           algorithm == 0 ? 0 : layer.backward_candidates().size() - 1);
            p.expect_right(p.found(), layer.candidates()[algorithm].name);
          }
        }
      },
      kDeadline_s);
}

// Shards that end within a tile, of unequal length, and with a tile less than the others.
TEST_P(SanitizedFused, AnyRows) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run(
      [](GpuCommunicator& comm) {
        const LtContext lt;
        for (const DType dtype : {DType::bf16, DType::e4m3}) {
          for (const int64_t m : {67 * comm.size() + 1, 256 * comm.size() + 1}) {
            OpDesc shape{m, 272, 528, dtype};
            shape.scaling = Scaling::row;
            gpu::AgGemm ag(comm, lt, shape);
            try_family(comm, ag, ag_operands(comm, shape));
            gpu::GemmRs rs(comm, lt, shape);
            try_family(comm, rs, sum_operands(comm, shape, true));
          }
        }
      },
      kDeadline_s);
}

// All candidates, fused or not.
TEST_P(SanitizedFused, GemmAr) {
  run(
      [](GpuCommunicator& comm) {
        const LtContext lt;
        for (const DType dtype : {DType::bf16, DType::f16, DType::e4m3}) {
          for (const int64_t m : {1, 72}) {
            OpDesc shape{m, 208, m == 1 ? 1040 : 192, dtype};
            shape.scaling = Scaling::row;
            gpu::GemmAr op(comm, lt, shape);
            const ScaledOperands o = sum_operands(comm, shape, false);
            try_candidates(comm, candidates_of(op), o, "gemm_ar");
          }
        }
      },
      kDeadline_s);
}

// Serial and fused.
TEST_P(SanitizedFused, Encoded) {
  run(
      [](GpuCommunicator& comm) {
        const LtContext lt;
        for (const char* wire : {"int8", "int4:g32"}) {
          for (const char* op : {"gemm_rs", "gemm_ar", "ag_gemm"}) {
            const bool gathers = op == std::string("ag_gemm");
            OpDesc shape{256 * comm.size(), gathers ? 136 : 264, gathers ? 640 : 576, DType::bf16};
            shape.op = op;
            shape.collective = find_operator(op)->collective;
            shape.wire = Wire::parse(wire);
            EncodedDense dense(comm, lt, shape, gathers ? EncodedAgOp::make : EncodedRsOp::make);
            const ScaledOperands o = gathers
                                         ? ag_operands(comm, shape)
                                         : sum_operands(comm, shape, op == std::string("gemm_rs"));
            for (const Candidate& candidate : dense.candidates()) {
              if (!candidate.refusal.empty()) continue;
              poison(o.out.tensor, comm.stream());
              candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor});
              comm.synchronize();
              const Verdict verdict =
                  verify_product(o.out.tensor, o.reference, kSamples, comm.stream());
              EXPECT_LE(verdict.max_rel, 12 * shape.wire.error_bound()) << op << candidate.name;
              EXPECT_EQ(verdict.not_finite, 0) << op << candidate.name;
            }
          }
        }
      },
      kDeadline_s);
}

INSTANTIATE_TEST_SUITE_P(Gpu, Sanitized, testing::Values(2), gpus_name);
INSTANTIATE_TEST_SUITE_P(Gpu, SanitizedFused, testing::Values(2), gpus_name);

}  // namespace
}  // namespace tandem::test
