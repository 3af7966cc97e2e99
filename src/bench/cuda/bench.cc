#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include "bench/bench_moe.h"
#include "bench/bench_receipt.h"
#include "bench/cuda/bare_copies.h"
#include "bench/cuda/bench_setting.h"
#include "bench/cuda/tile_recorder.h"
#include "bench/cuda/verify.h"
#include "comm/world/gpus.h"
#include "core/cuda/fill.h"
#include "core/cuda/graph.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/ag_gemm/cuda/encoded_ag.h"
#include "overlap/ag_gemm/operator.h"
#include "overlap/ag_wgrad/cuda/ag_wgrad.h"
#include "overlap/ag_wgrad/operator.h"
#include "overlap/contract/cuda/gpu_operator.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_ar/operator.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "overlap/gemm_rs/operator.h"
#include "overlap/registry.h"
#include "overlap/scatter/cuda/encoded_rs.h"

namespace tandem::gpu {
namespace {

// Stream bases for random values, one stream per rank each.
constexpr uint64_t kW = 200, kXScales = 300, kWScales = 400;
constexpr uint64_t kResidual = 500, kGain = 600;  // equal on all ranks
constexpr int64_t kSamples = 8192;
constexpr int kBurst = 10;

using SpansOf = std::vector<SpanEvent> (*)(std::span<const TileRecord>, const TileGrid&, uint64_t);

// Per-operator parameters of run_dense.
struct Dense {
  OpDesc desc;  // with the requested wire format
  int64_t x_first_row;
  ProductReference reference;
  int64_t peer_bytes;  // to each other rank
  bool graph = false;
  SpansOf spans = nullptr;  // converts the kernels' records
};

/// Candidate whose call is recorded: the leader of a family if its kernel records, else another one
/// of the family that does; null if there is none.
template <typename Op>
const Candidate* recorded_of(const Op& op, const std::vector<Candidate>& leaders) {
  if constexpr (requires { op.recorded_tiles(leaders[0]); }) {
    for (const Candidate& leader : leaders) {
      if (op.recorded_tiles(leader).rows > 0) return &leader;
      for (const Candidate& other : op.candidates()) {
        if (other.family == leader.family && op.recorded_tiles(other).rows > 0) return &other;
      }
    }
  }
  return nullptr;
}

/// Runs and records one more call.
template <typename Op>
std::vector<RankEvents> record_call(const Setting& at, Op& op, const Candidate& candidate,
                                    SpansOf spans, const Operands& operands) {
  if constexpr (requires { op.recorded_tiles(candidate); }) {
    GpuCommunicator& comm = at.comm;
    const RecordedTiles tiles = op.recorded_tiles(candidate);
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
        if (!op.pushes_by_engine(candidate)) return all;
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
    auto ranks =
        record_tiles(comm, at.stopwatch, recorder, {[&] { candidate.run(operands); }, events});
    if constexpr (requires { op.time_pushes(&pushes); }) op.time_pushes(nullptr);
    op.record_tiles({});
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
void check_candidate(const Setting& at, const Dense& what, const Candidate& candidate,
                     double encoding, const Operands& operands, BenchResult& result) {
  GpuCommunicator& comm = at.comm;
  const cudaStream_t stream = comm.stream();
  const Tensor& out = operands.out;
  const AddNorm* const add_norm = operands.add_norm;
  const bool equal =
      runs_are_equal(comm, what.desc.gradient, out, add_norm, [&] { candidate.run(operands); });
  ProductReference reference = what.reference;
  reference.roundings = roundings_of(candidate.name, reference.terms);
  std::vector<double> worst{0, 0, 0, equal ? 0.0 : 1.0};
  const auto add = [&](const Verdict& verdict) {
    worst[0] = std::max(worst[0], verdict.max_rel);
    worst[1] = std::max(worst[1], encoding > 0 ? verdict.max_rel / encoding : verdict.of_bound);
    worst[2] += double(verdict.not_finite);
  };
  if (add_norm) {
    reference.residual_stream = kResidual;
    reference.sum_is_rounded = rounds_sum(candidate.name);
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

/// Details of the family whose leader is the fastest overlapped candidate, else of the last one.
std::string detail_of(const std::vector<Candidate>& leaders, const std::string& overlapped) {
  std::string detail;
  for (const Candidate& leader : leaders) {
    if (leader.family.empty()) continue;
    detail = leader.name;
    if (leader.family == overlapped) break;
  }
  return detail;
}

/// Operands of a case with the values that its reference has.
class FilledOperands {
 public:
  FilledOperands(GpuCommunicator& comm, const OpDesc& s, const Dense& what)
      : x_(extents_of(s).x),
        weight_(extents_of(s).weight),
        out_(extents_of(s).out),
        x_scales_(size_t(s.scaled_by_row() ? s.x.rows : 1) * sizeof(float)),
        weight_scales_(size_t(s.scaled_by_row() ? s.n : 1) * sizeof(float)) {
    const cudaStream_t stream = comm.stream();
    const uint64_t stream_offset = what.reference.terms > 1 ? uint64_t(comm.rank()) : 0;
    fill_uniform(x_.tensor, kSeed, kX + stream_offset, what.x_first_row * s.k, stream);
    const uint64_t of_one = s.gradient ? what.reference.x_stream : what.reference.w_stream;
    fill_uniform(weight_.tensor, kSeed, what.reference.terms > 1 ? kW + stream_offset : of_one, 0,
                 stream);
    const auto scales = [](const DeviceMemory& memory) {
      return memory.view(DType::f32, {int64_t(memory.bytes() / sizeof(float))});
    };
    scales_ = {scales(x_scales_), scales(weight_scales_)};
    fill_scales(scales_.x, kSeed, kXScales + stream_offset,
                s.scaled_by_row() ? what.x_first_row : 0, stream);
    fill_scales(scales_.weight, kSeed, what.reference.w_scales + stream_offset, 0, stream);
    is_scaled_ = s.scaled();
    comm.synchronize();
    if (!s.add_norm) return;
    tail_.emplace(extents_of(s).out);
    fill_uniform(tail_->residual.tensor, kSeed, kResidual, 0, stream);
    fill_uniform(tail_->add_norm.gain, kSeed, kGain, 0, stream);
  }
  Operands all() const {
    return {x_.tensor,
            weight_.tensor,
            out_.tensor,
            nullptr,
            is_scaled_ ? &scales_ : nullptr,
            tail_ ? &tail_->add_norm : nullptr};
  }

 private:
  Scratch x_, weight_, out_;
  DeviceMemory x_scales_, weight_scales_;
  Scales scales_;
  bool is_scaled_ = false;
  std::optional<AddNormScratch> tail_;
};

template <typename Op, typename GemmOnly>
void run_dense(const Setting& at, Op& op, const Dense& what, const GemmOnly& gemm_only,
               BenchResult& result) {
  GpuCommunicator& comm = at.comm;
  const cudaStream_t stream = comm.stream();
  OpDesc s = what.desc;
  s.wire = {};
  const auto note_refusals = [&](const std::vector<Candidate>& all) {
    for (const Candidate& one : all) {
      if (one.refusal.empty()) continue;
      result.refusals +=
          fmt::format("{}{}: {}", result.refusals.empty() ? "" : "; ", one.name, one.refusal);
    }
  };
  note_refusals(op.candidates());
  const std::vector<Candidate> leaders = family_leaders(comm, s, usable(comm, op.candidates()));
  const Candidate* const recorded = recorded_of(op, leaders);
  if (at.timeline && !recorded) {
    throw Unsupported(
        "--timeline: no kernel that records takes this shape in this build: "
        "expected one configured with TANDEM_DEVICE_TIMELINE (docs/dev/benchmarking.md)");
  }
  const FilledOperands filled(comm, s, what);
  const Operands operands = filled.all();
  std::vector<Candidate> candidates = leaders;
  for (const Candidate& candidate : candidates) {
    check_candidate(at, what, candidate, 0, operands, result);
  }
  std::optional<EncodedDense> encoded;
  if (!what.desc.wire.is_none() && comm.size() > 1) {
    const bool gathers = s.collective == Collective::all_gather;
    encoded.emplace(comm, at.lt, what.desc, gathers ? EncodedAgOp::make : EncodedRsOp::make);
    result.wire_bytes = encoded->wire_bytes();
    note_refusals(encoded->candidates());
    for (const Candidate& candidate : usable(comm, encoded->candidates())) {
      candidates.push_back(candidate);
      check_candidate(at, what, candidate, encoding_error(what.desc, comm.size()), operands,
                      result);
    }
  }
  BareCopies wire(comm, what.peer_bytes);
  std::vector<BoundCandidate> alternatives{{.name = "gemm", .run = [&] { gemm_only(operands); }},
                                           {.name = "wire", .run = [&] { wire.run(); }}};
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
    const BenchTimes took = times_of(times[2 + i]);
    const bool is_nccl = candidates[i].name == kNccl;
    // A single rank has nothing to move: its operators are only the GEMM. Ranks that share a GPU
    // have no NCCL: that candidate's collective is our pipelined one.
    result.add(comm.size() == 1               ? "product"
               : is_nccl && comm.shares_gpu() ? "serial_pipelined"
                                              : candidates[i].group(),
               candidates[i].form, took, candidates[i].encoded);
    if (is_nccl && comm.size() > 1 && !comm.shares_gpu()) result.nccl = took;
  }
  result.detail = detail_of(leaders, result.overlapped_name);
  if constexpr (requires { op.gemm_algorithm(); }) {
    if (s.scaled()) {
      result.detail += fmt::format("{}scales {}", result.detail.empty() ? "" : "; ",
                                   name_of(op.gemm_algorithm()));
    }
  }
  if (at.timeline) result.timeline = record_call(at, op, *recorded, what.spans, operands);
}

/// Descriptor of this rank's operator, with the requested wire format.
OpDesc desc_of(const Setting& at, const BenchRequest& c, const OperatorRow& row) {
  OpDesc whole{c.m, c.n, c.k, c.dtype};
  whole.scaling = c.scaling;
  whole.add_norm = c.add_norm;
  whole.wire = c.wire;
  return describe_shard(row, at.comm, whole);
}

OpDesc uncompressed(OpDesc desc) {
  desc.wire = {};
  return desc;
}

void run_ag(const Setting& at, const BenchRequest& c, BenchResult& result) {
  const int ranks = at.comm.size();
  const OpDesc desc = desc_of(at, c, kAgGemmRow);
  AgGemm op(at.comm, at.lt, uncompressed(desc));
  const DeviceMemory gathered(size_t(c.m * c.k) * size_of(c.dtype));
  const Tensor whole = gathered.view(c.dtype, {c.m, c.k});
  fill_uniform(whole, kSeed, kX, 0, at.comm.stream());
  const DeviceMemory gathered_scales(size_t(c.m) * sizeof(float));
  const Tensor whole_scales =
      gathered_scales.view(DType::f32, {desc.scaled_by_row() ? c.m : int64_t(1)});
  fill_scales(whole_scales, kSeed, kXScales, 0, at.comm.stream());
  const uint64_t rank = uint64_t(at.comm.rank());
  const Dense what{.desc = desc,
                   .x_first_row = shard_of(c.m, ranks, at.comm.rank()).begin,
                   .reference = {kSeed, kX, kW + rank, 1, c.k, 0, c.dtype, 1, c.scaling, kXScales,
                                 kWScales + rank},
                   .peer_bytes = shard_of(c.m, ranks, 0).count *
                                 (c.k * int64_t(size_of(c.dtype)) + (desc.scaled_by_row() ? 4 : 0)),
                   .spans = gather_spans};
  run_dense(
      at, op, what,
      [&](const Operands& o) {
        const Scales all{whole_scales, o.scales ? o.scales->weight : Tensor()};
        op.gemm_only({whole, o.weight, o.out, nullptr, o.scales ? &all : nullptr});
      },
      result);
}

void run_wgrad(const Setting& at, const BenchRequest& c, BenchResult& result) {
  const int ranks = at.comm.size();
  const OpDesc desc = desc_of(at, c, kAgWgradRow);
  AgWgrad op(at.comm, at.lt, desc);
  const Scratch whole({c.dtype, c.m, c.k});
  fill_uniform(whole.tensor, kSeed, kX, 0, at.comm.stream());
  const Dense what{.desc = desc,
                   .x_first_row = shard_of(c.m, ranks, at.comm.rank()).begin,
                   .reference = {.seed = kSeed,
                                 .x_stream = kW + uint64_t(at.comm.rank()),
                                 .w_stream = kX,
                                 .terms = 1,
                                 .k = c.m,
                                 .first_row = 0,
                                 .dtype = c.dtype,
                                 .x_is_km = true,
                                 .w_is_kn = true},
                   .peer_bytes = shard_of(c.m, ranks, 0).count * c.k * int64_t(size_of(c.dtype))};
  run_dense(
      at, op, what,
      [&](const Operands& o) {
        op.gemm_only({whole.tensor, o.weight, o.out});
      },
      result);
}

void run_rs(const Setting& at, const BenchRequest& c, BenchResult& result) {
  const int ranks = at.comm.size();
  const OpDesc desc = desc_of(at, c, kGemmRsRow);
  GemmRs op(at.comm, at.lt, uncompressed(desc));
  const Dense what{
      .desc = desc,
      .x_first_row = 0,
      .reference = {kSeed, kX, kW, ranks, c.k / ranks, shard_of(c.m, ranks, at.comm.rank()).begin,
                    c.dtype, 1, c.scaling, kXScales, kWScales},
      .peer_bytes = shard_of(c.m, ranks, 0).count * c.n * int64_t(size_of(desc.result())),
      .spans = scatter_spans};
  run_dense(
      at, op, what, [&](const Operands& o) { op.gemm_only(o); }, result);
}

void run_ar(const Setting& at, const BenchRequest& c, BenchResult& result) {
  const int ranks = at.comm.size();
  const OpDesc desc = desc_of(at, c, kGemmArRow);
  GemmAr op(at.comm, at.lt, uncompressed(desc));
  const Dense what{.desc = desc,
                   .x_first_row = 0,
                   .reference = {kSeed, kX, kW, ranks, c.k / ranks, 0, c.dtype, 1, c.scaling,
                                 kXScales, kWScales},
                   .peer_bytes = 2 * c.m * c.n * int64_t(size_of(desc.result())) / ranks,
                   .graph = true};
  run_dense(
      at, op, what, [&](const Operands& o) { op.gemm_only(o); }, result);
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
  if (!collective_only) {
    result.set_efficiency(EctOf::medians);
    result.receipts = {choose_receipt(request, result, comm.size())};
  }
  return result;
}

}  // namespace tandem
