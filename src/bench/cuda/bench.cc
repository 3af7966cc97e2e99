#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include "bench/bench_moe.h"
#include "bench/cuda/bench_setting.h"
#include "bench/cuda/dense_operands.h"
#include "bench/cuda/tile_recorder.h"
#include "bench/cuda/verify.h"
#include "comm/world/gpus.h"
#include "core/cuda/graph.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/ag_gemm/cuda/encoded_ag.h"
#include "overlap/ag_gemm/operator.h"
#include "overlap/ag_wgrad/cuda/ag_wgrad.h"
#include "overlap/ag_wgrad/operator.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_ar/operator.h"
#include "overlap/gemm_rs/cuda/encoded_rs.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "overlap/gemm_rs/operator.h"
#include "overlap/registry.h"

namespace tandem::gpu {
namespace {

constexpr int64_t kSamples = 8192;
constexpr int kBurst = 10;

struct Recording {
  Algorithm algorithm;
  int variant;
};

/// Algorithm whose kernel records, Algorithm::fused before Algorithm::fused_cutlass: the variant in
/// use if it records, else the first one that does.
template <typename Op>
std::optional<Recording> recording_of(const Op& op) {
  if constexpr (requires { op.recorded_tiles(Algorithm::fused, 0); }) {
    for (const Algorithm algorithm : {Algorithm::fused, Algorithm::fused_cutlass}) {
      for (int i = 0; i < op.variants(algorithm); ++i) {
        const int variant = (op.variant(algorithm) + i) % op.variants(algorithm);
        if (op.recorded_tiles(algorithm, variant).rows > 0) return Recording{algorithm, variant};
      }
    }
  }
  return {};
}

/// Runs and records one more call.
template <typename Op>
std::vector<RankEvents> record_call(const Setting& at, Op& op, const Recording& recording,
                                    SpansOf spans, const Tensor& x, const Tensor& w,
                                    const Tensor& out) {
  if constexpr (requires { op.recorded_tiles(Algorithm::fused, 0); }) {
    GpuCommunicator& comm = at.comm;
    const auto [algorithm, variant] = recording;
    const int in_use = op.variant(algorithm);
    op.use_variant(algorithm, variant);
    const RecordedTiles tiles = op.recorded_tiles(algorithm, variant);
    const TileGrid grid{tiles.rows, tiles.columns, comm.rank(), comm.size()};
    const TileRecorder recorder(tiles);
    op.record_tiles(recorder.log());
    std::vector<Event> pushes;
    if constexpr (requires { op.time_pushes(&pushes); }) {
      for (int i = 0; i < 2 * (comm.size() - 1); ++i) pushes.emplace_back(Event::Kind::timing);
      op.time_pushes(&pushes);
    }
    const auto events = [&](const std::vector<TileRecord>& records, uint64_t base_ns,
                            const Event& base) {
      std::vector<SpanEvent> all = spans(records, grid, base_ns);
      if constexpr (requires { op.push_target(0); }) {
        if (!op.pushes_by_engine(recording.variant)) return all;
        const auto time = [&](const Event& event) {
          const auto since = int64_t(microseconds(base, event) * 1e3);
          return TimePoint(std::chrono::nanoseconds(int64_t(base_ns) + since));
        };
        for (int step = 0; step + 1 < comm.size(); ++step) {
          all.push_back({SpanKind::transfer, "push", time(pushes[size_t(2 * step)]),
                         time(pushes[size_t(2 * step + 1)]), -1, op.push_target(step)});
        }
      }
      return all;
    };
    auto ranks = record_tiles(comm, at.stopwatch, recorder,
                              {[&] { op.run(recording.algorithm, x, w, out); }, events});
    if constexpr (requires { op.time_pushes(&pushes); }) op.time_pushes(nullptr);
    op.record_tiles({});
    op.use_variant(algorithm, in_use);
    return ranks;
  }
  return {};
}

/// Whether repeated runs are bitwise equal.
bool runs_are_equal(GpuCommunicator& comm, bool gradient, const Tensor& out,
                    const AddNorm* add_norm, const std::function<void()>& run) {
  const cudaStream_t stream = comm.stream();
  uint64_t first = 0;
  bool equal = true;
  for (int i = 0; i < kEqualRuns; ++i) {
    if (gradient) {
      check(cudaMemsetAsync(out.data(), 0, out.bytes(), stream), "clear an output");
    } else {
      poison(out, stream);
    }
    if (add_norm) poison(add_norm->hidden, stream);
    run();
    comm.synchronize();
    const uint64_t bits =
        digest(out, stream) + (add_norm ? 3 * digest(add_norm->hidden, stream) : 0);
    if (i == 0) first = bits;
    equal = equal && bits == first;
  }
  return equal;
}

/// Bound of the encoding error over verify_product's divisor, the root of the sum of squared terms.
/// For operands uniform in [-1, 1) a partial product of k terms is within six standard deviations,
/// each root (k) / 3; AG+GEMM encodes rows of x, so each term is off independently.
double encoding_error(const OpDesc& s, int ranks) {
  const double each = s.wire.error_bound() + 0x1p-8;
  if (s.collective == Collective::all_gather) return 6 * each;
  const double sums = s.collective == Collective::all_reduce ? 2.0 : 1.0;
  return sums * ranks * 6 * each / std::sqrt(double(ranks));
}

/// Checks repeated runs, the last one against exact results. `encoding`: error bound of encoded
/// values; 0: uncompressed.
void check_candidate(const Setting& at, const Dense& what, Algorithm algorithm, double encoding,
                     const Tensor& out, const AddNorm* add_norm, const std::function<void()>& run,
                     BenchResult& result) {
  GpuCommunicator& comm = at.comm;
  const cudaStream_t stream = comm.stream();
  const bool equal = runs_are_equal(comm, what.gradient, out, add_norm, run);
  ProductReference reference = what.reference;
  reference.roundings = roundings_of(algorithm, reference.terms);
  std::vector<double> worst{0, 0, 0, equal ? 0.0 : 1.0};
  const auto add = [&](const Verdict& verdict) {
    worst[0] = std::max(worst[0], verdict.max_rel);
    worst[1] = std::max(worst[1], encoding > 0 ? verdict.max_rel / encoding : verdict.of_bound);
    worst[2] += double(verdict.not_finite);
  };
  if (add_norm) {
    reference.residual_stream = kResidual;
    reference.sum_is_rounded = algorithm != Algorithm::one_shot && algorithm != Algorithm::two_shot;
    add(verify_product(add_norm->hidden, reference, kSamples, stream));
    add(verify_norm(out, add_norm->hidden, add_norm->gain, add_norm->eps, stream));
  } else {
    add(verify_product(out, reference, kSamples, stream));
  }
  worst = comm.slowest(worst);
  result.max_rel = std::max(result.max_rel, worst[0]);
  result.of_bound = std::max(result.of_bound, worst[1]);
  result.finite = result.finite && worst[2] == 0;
  result.bitwise_equal_runs = result.bitwise_equal_runs && worst[3] == 0;
}

template <typename Op, typename GemmOnly>
void run_dense(const Setting& at, Op& op, const Dense& what, const GemmOnly& gemm_only,
               BenchResult& result) {
  GpuCommunicator& comm = at.comm;
  const cudaStream_t stream = comm.stream();
  const std::optional<Recording> recording = recording_of(op);
  if (at.timeline && !recording) {
    throw Unsupported(
        "--timeline: no kernel that records takes this shape in this build: "
        "expected one configured with TANDEM_DEVICE_TIMELINE (docs/dev/benchmarking.md)");
  }
  const OpDesc& s = what.shape;
  if constexpr (requires { op.gemm_algorithm(); }) {
    if (s.scaled()) {
      result.detail += fmt::format("{}scales {}", result.detail.empty() ? "" : "; ",
                                   name_of(op.gemm_algorithm()));
    }
  }
  const DenseOperands filled(comm, what);
  const Operands operands = filled.all();
  const Tensor &x = operands.x, &w = operands.weight, &out = operands.out;
  const AddNorm* const add_norm = operands.add_norm;
  const std::vector<Algorithm> algorithms = op.algorithms();
  std::vector<Candidate> candidates = candidates_of(op, algorithms);
  for (size_t i = 0; i < algorithms.size(); ++i) {
    // Ranks that share a GPU have no NCCL: that candidate's collective is our pipelined one.
    if (is_nccl(algorithms[i]) && comm.shares_gpu()) candidates[i].name = "serial_pipelined";
    check_candidate(
        at, what, algorithms[i], 0, out, add_norm, [&] { candidates[i].run(operands); }, result);
  }
  std::optional<EncodedDense> encoded;
  if (!what.encoded.wire.is_none() && comm.size() > 1) {
    const bool gathers = what.encoded.collective == Collective::all_gather;
    encoded.emplace(comm, at.lt, what.encoded, gathers ? EncodedAgOp::make : EncodedRsOp::make);
    result.wire_bytes = encoded->wire_bytes();
    for (const Candidate& candidate : encoded->candidates()) {
      candidates.push_back(candidate);
      check_candidate(
          at, what, Algorithm::automatic, encoding_error(what.encoded, comm.size()), out, add_norm,
          [&] { candidate.run(operands); }, result);
    }
  }
  const PeerCopies copies(comm, what.peer_bytes);
  std::vector<BoundCandidate> alternatives{
      {.name = "gemm", .run = [&] { gemm_only(x, w, out, operands.scales); }},
      {.name = "wire", .run = [&] { copies.run(); }}};
  for (const Candidate& candidate : candidates) {
    alternatives.push_back({.name = candidate.name, .run = [&] { candidate.run(operands); }});
  }
  std::vector<std::unique_ptr<Graph>> graphs;
  if (what.graph) {
    for (BoundCandidate& alternative : alternatives) {
      graphs.push_back(std::make_unique<Graph>(stream, alternative.run));
      alternative.run = [graph = graphs.back().get(), stream] { graph->launch(stream); };
    }
  }
  const auto times = at.stopwatch.measure(alternatives, at.options);
  result.graph = what.graph;
  result.bytes = what.peer_bytes * (comm.size() - 1);
  result.gemm = times_of(times[0]);
  result.wire = times_of(times[1]);
  for (size_t i = 0; i < candidates.size(); ++i) {
    // A single rank has nothing to move: its operators are only the GEMM.
    const BenchTimes took = times_of(times[2 + i]);
    result.add(comm.size() == 1 ? "product" : candidates[i].name, candidates[i].form, took,
               candidates[i].encoded);
    if (i < algorithms.size() && is_nccl(algorithms[i]) && comm.size() > 1 && !comm.shares_gpu())
      result.nccl = took;
  }
  if (at.timeline) result.timeline = record_call(at, op, *recording, what.spans, x, w, out);
}

OpDesc encoded_of(const BenchRequest& c, const OperatorRow& row, const OpDesc& shape) {
  OpDesc encoded = shape;
  encoded.op = row.name;
  encoded.collective = row.collective;
  encoded.wire = c.wire;
  return encoded;
}

OpDesc shape_of(const BenchRequest& c, int64_t n, int64_t k) {
  OpDesc shape{c.m, n, k, c.dtype};
  shape.scaling = c.scaling;
  shape.add_norm = c.add_norm;
  return shape;
}

void run_ag(const Setting& at, const BenchRequest& c, BenchResult& result) {
  const int ranks = at.comm.size();
  const OpDesc shape = shape_of(c, c.n / ranks, c.k);
  const Shard local = shard_of(c.m, ranks, at.comm.rank());
  AgGemm op(at.comm, at.lt, shape, Algorithm::fused);
  if (op.variants(Algorithm::fused) > 0) result.detail = op.describe(Algorithm::fused);
  const DeviceMemory gathered(size_t(c.m * c.k) * size_of(c.dtype));
  const Tensor whole = gathered.view(c.dtype, {c.m, c.k});
  fill_uniform(whole, kSeed, kX, 0, at.comm.stream());
  const DeviceMemory gathered_scales(size_t(c.m) * sizeof(float));
  const Tensor whole_scales =
      gathered_scales.view(DType::f32, {shape.scaled_by_row() ? c.m : int64_t(1)});
  fill_scales(whole_scales, kSeed, kXScales, 0, at.comm.stream());
  const uint64_t rank = uint64_t(at.comm.rank());
  const Dense what{
      local.count,
      local.begin,
      c.m,
      shape,
      {kSeed, kX, kW + rank, 1, c.k, 0, c.dtype, 1, c.scaling, kXScales, kWScales + rank},
      shard_of(c.m, ranks, 0).count *
          (c.k * int64_t(size_of(c.dtype)) + (shape.scaled_by_row() ? 4 : 0)),
      false,
      gather_spans,
      false,
      encoded_of(c, kAgGemmRow, shape)};
  run_dense(
      at, op, what,
      [&](const Tensor&, const Tensor& w, const Tensor& out, const Scales* scales) {
        const Scales all{whole_scales, scales ? scales->weight : Tensor()};
        op.gemm_only(whole, w, out, nullptr, scales ? &all : nullptr);
      },
      result);
}

void run_wgrad(const Setting& at, const BenchRequest& c, BenchResult& result) {
  const int ranks = at.comm.size();
  const OpDesc shape = shape_of(c, c.n / ranks, c.k);
  const Shard local = shard_of(c.m, ranks, at.comm.rank());
  AgWgrad op(at.comm, at.lt, shape, Algorithm::chunked);
  const Scratch whole({c.dtype, c.m, c.k});
  fill_uniform(whole.tensor, kSeed, kX, 0, at.comm.stream());
  const Dense what{.x_rows = local.count,
                   .x_first_row = local.begin,
                   .out_rows = 0,
                   .shape = shape,
                   .reference = {.seed = kSeed,
                                 .x_stream = kW + uint64_t(at.comm.rank()),
                                 .w_stream = kX,
                                 .terms = 1,
                                 .k = c.m,
                                 .first_row = 0,
                                 .dtype = c.dtype,
                                 .x_is_km = true,
                                 .w_is_kn = true},
                   .peer_bytes = shard_of(c.m, ranks, 0).count * c.k * int64_t(size_of(c.dtype)),
                   .graph = false,
                   .spans = nullptr,
                   .gradient = true};
  run_dense(
      at, op, what,
      [&](const Tensor&, const Tensor& dy, const Tensor& dw, const Scales*) {
        op.gemm_only(whole.tensor, dy, dw);
      },
      result);
}

void run_rs(const Setting& at, const BenchRequest& c, BenchResult& result) {
  const int ranks = at.comm.size();
  const OpDesc shape = shape_of(c, c.n, c.k / ranks);
  const Shard local = shard_of(c.m, ranks, at.comm.rank());
  GemmRs op(at.comm, at.lt, shape, Algorithm::fused);
  const Algorithm described =
      op.variants(Algorithm::fused_cutlass) > 0 ? Algorithm::fused_cutlass : Algorithm::fused;
  if (op.variants(described) > 0) result.detail = op.describe(described);
  const Dense what{
      c.m,
      0,
      local.count,
      shape,
      {kSeed, kX, kW, ranks, c.k / ranks, local.begin, c.dtype, 1, c.scaling, kXScales, kWScales},
      shard_of(c.m, ranks, 0).count * c.n * int64_t(size_of(shape.result())),
      false,
      scatter_spans,
      false,
      encoded_of(c, kGemmRsRow, shape)};
  run_dense(
      at, op, what,
      [&](const Tensor& x, const Tensor& w, const Tensor&, const Scales* scales) {
        op.gemm_only(x, w, nullptr, scales);
      },
      result);
  if (result.overlapped_name == name_of(Algorithm::fused) && described != Algorithm::fused) {
    result.detail = op.describe(Algorithm::fused);
  }
}

void run_ar(const Setting& at, const BenchRequest& c, BenchResult& result) {
  const int ranks = at.comm.size();
  const OpDesc shape = shape_of(c, c.n, c.k / ranks);
  GemmAr op(at.comm, at.lt, shape, Algorithm::fused);
  if (op.variants(Algorithm::fused) > 0) result.detail = op.describe(Algorithm::fused);
  const Dense what{
      c.m,
      0,
      c.m,
      shape,
      {kSeed, kX, kW, ranks, c.k / ranks, 0, c.dtype, 1, c.scaling, kXScales, kWScales},
      2 * c.m * c.n * int64_t(size_of(shape.result())) / ranks,
      true,
      nullptr,
      false,
      encoded_of(c, kGemmArRow, shape)};
  run_dense(
      at, op, what,
      [&](const Tensor& x, const Tensor& w, const Tensor&, const Scales* scales) {
        op.gemm_only(x, w, nullptr, scales);
      },
      result);
}

}  // namespace

}  // namespace tandem::gpu

namespace tandem {
namespace {

struct GpuBench {
  const OperatorRow* row;
  void (*run)(const gpu::Setting&, const BenchRequest&, BenchResult&);
};
constexpr GpuBench kOperators[] = {{&kAgGemmRow, gpu::run_ag},
                                   {&kAgWgradRow, gpu::run_wgrad},
                                   {&kGemmRsRow, gpu::run_rs},
                                   {&kGemmArRow, gpu::run_ar}};

}  // namespace

BenchResult run_gpu_bench(Communicator& any, const BenchRequest& request) {
  gpu::GpuCommunicator& comm = gpu::as_gpu(any);
  if (request.m < 1 || request.n < 1 || request.k < 1 || request.repeats < 1) {
    throw InvalidArgument(fmt::format("bench: m {} n {} k {} repeats {}: expected at least 1",
                                      request.m, request.n, request.k, request.repeats));
  }
  check_gpu_memory(request, comm.size(), this_machines_gpus().memory_gib * double(1ull << 30));
  if (!comm.one_node()) throw Unsupported("bench on GPUs of several nodes: expected those of one");
  const OperatorRow* row = find_operator(request.op);
  const BenchMoeOp* moe = find_moe(request.op);
  const bool takes_wire = row ? row->codec_error != nullptr
                              : gpu::is_collective(request.op) || (moe && moe->is_layer());
  if (!request.wire.is_none() && !takes_wire) {
    throw Unsupported("bench " + request.op + " --codec " + request.wire.describe() +
                      " on GPUs: expected all_reduce, all_gather, reduce_scatter, all_to_all, "
                      "ag_gemm, gemm_rs, gemm_ar or moe");
  }
  if (request.add_norm && !(row && row->add_norm)) {
    throw InvalidArgument("bench: --add-norm with " + request.op + ": expected gemm_ar");
  }
  const bool gathers = row && row->collective == Collective::all_gather;
  const int64_t divided = gathers ? request.n : request.k;
  const bool collective_only = gpu::is_collective(request.op);
  if (!collective_only && !is_moe(request.op) && divided % comm.size() != 0) {
    throw InvalidArgument(fmt::format("bench {}: {} {} on {} GPUs: expected a multiple", request.op,
                                      gathers ? "n" : "k", divided, comm.size()));
  }
  auto& stopwatch = comm.attached<gpu::Stopwatch>([&] { return new gpu::Stopwatch(comm); });
  if (request.timeline && (collective_only || is_moe(request.op))) {
    throw Unsupported("--timeline: " + request.op + " on GPUs: expected ag_gemm or gemm_rs");
  }
  const gpu::Setting at{comm,
                        gpu::lt_context(comm),
                        stopwatch,
                        {.repeats = request.repeats, .burst = gpu::kBurst},
                        request.timeline};
  BenchResult result;
  result.bound = 1;
  const auto* found = std::ranges::find(kOperators, row, &GpuBench::row);
  if (found != std::end(kOperators)) {
    found->run(at, request, result);
  } else if (is_moe(request.op)) {
    gpu::run_moe(at, request, result);
  } else if (collective_only) {
    gpu::run_collective(at, request, result);
  } else {
    throw Unsupported(
        fmt::format("bench {} on GPUs: expected ag_gemm, ag_wgrad, gemm_rs, gemm_ar, moe, "
                    "all_reduce, all_gather or reduce_scatter: the others are NCCL's own",
                    request.op));
  }
  result.baseline = result.serial_name;
  if (result.overlapped_name.empty()) {  // one rank, or only serial candidates
    result.overlapped = result.serial;
    result.overlapped_name = result.serial_name;
  }
  if (!collective_only) result.set_efficiency(EctOf::medians);
  return result;
}

}  // namespace tandem
