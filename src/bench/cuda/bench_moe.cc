// Mixture-of-Experts layer on GPU ranks, with every candidate, as CUDA graphs. Sampled rows are
// compared with f64 sums on the host; all candidates must be bitwise equal. With a wire format, all
// encoded candidates must be, and their samples use decoded rows.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/cuda/moe_bench_case.h"
#include "bench/cuda/verify.h"
#include "bench/error_bound.h"
#include "codec/whole.h"
#include "core/cuda/graph.h"
#include "overlap/contract/operator_row.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int64_t kSampledRows = 2, kSampledColumns = 32;

/// Sampled columns of one expert's output for `row`.
std::vector<double> expert_result(const MoeCase& c, int32_t expert,
                                  const std::vector<double>& row) {
  const MoeShape& s = c.shape;
  const auto gate = c.gate(expert), up = c.up(expert);
  std::vector<double> inner(static_cast<size_t>(s.ffn)), result(size_t(kSampledColumns), 0.0);
  for (int64_t f = 0; f < s.ffn; ++f) {
    const double g = dot(&gate[size_t(f * s.hidden)], row.data(), s.hidden);
    inner[size_t(f)] =
        g / (1 + std::exp(-g)) * dot(&up[size_t(f * s.hidden)], row.data(), s.hidden);
  }
  for (int tp_rank = 0; tp_rank < s.tp; ++tp_rank) {
    const Shard local = shard_of(s.ffn, s.tp, tp_rank);
    const auto down = c.down(expert, tp_rank);
    for (int64_t i = 0; i < kSampledColumns; ++i) {
      const int64_t column = i * s.hidden / kSampledColumns;
      result[size_t(i)] +=
          dot(&down[size_t(column * local.count)], &inner[size_t(local.begin)], local.count);
    }
  }
  return result;
}

/// Row as the experts receive it.
std::vector<double> row_of(const MoeCase& c, int64_t row, const Wire& wire) {
  std::vector<double> values = read(c, c.x.rows(row, 1));
  if (wire.is_none() || c.comm.size() == 1) return values;
  const auto columns = int64_t(values.size());
  std::vector<BFloat16> bits;
  for (const double value : values) bits.push_back(BFloat16::from_float(float(value)));
  std::vector<std::byte> message(wire.bytes(columns, DType::bf16));
  codec::encode_whole(wire, DType::bf16, bits.data(), columns, message.data());
  codec::decode_whole(wire, message, DType::bf16, bits.data(), columns);
  for (size_t i = 0; i < bits.size(); ++i) values[i] = double(bits[i].to_float());
  return values;
}

/// Error bound of a result with encoded partial sums, over the largest sampled one. Each sum is off
/// by a fraction of its group's max, which is below twice the largest sample of such a sum, as both
/// have as many random terms; errors of different ranks add up like the sums themselves.
double error_of_sums(const MoeCase& c, const Wire& wire) {
  const int num_partials = std::min(c.comm.size(), c.shape.top_k * c.shape.tp);
  return c.comm.size() == 1
             ? 0
             : 2 * error_of_wire(wire, c.shape.dtype) * std::sqrt(double(num_partials));
}

/// Largest error of sampled results over the largest of them. `wire`: wire format of the rows.
double worst_error(const MoeCase& c, const Wire& wire) {
  const MoeShape& s = c.shape;
  double worst = 0, largest = 0;
  for (int64_t sample = 0; sample < std::min(kSampledRows, c.local.count); ++sample) {
    const int64_t row = (2 * sample + 1) * c.local.count / (2 * kSampledRows);
    const auto x = row_of(c, row, wire), found = read(c, c.out.rows(row, 1));
    std::vector<double> expected(size_t(kSampledColumns), 0.0);
    for (int k = 0; k < s.top_k; ++k) {
      const auto of_one = expert_result(c, c.chosen[size_t(row * s.top_k + k)], x);
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += double(c.weight()) * of_one[i];
    }
    for (int64_t i = 0; i < kSampledColumns; ++i) {
      const double value = found[size_t(i * s.hidden / kSampledColumns)];
      largest = std::max(largest, std::abs(expected[size_t(i)]));
      const double error = std::abs(value - expected[size_t(i)]);
      worst = std::isfinite(value) ? std::max(worst, error) : INFINITY;
    }
  }
  return largest > 0 ? worst / largest : 0;
}

/// Rows sent by this rank. It receives as many sums, and sends as many on average.
int64_t sent_rows(const MoeCase& c) {
  int64_t rows = 0;
  for (int64_t row = 0; row < c.local.count; ++row) {
    unsigned token_in_rank = 0;
    for (int k = 0; k < c.shape.top_k; ++k) {
      const int holder = c.coords.grid.holder(c.chosen[size_t(row * c.shape.top_k + k)]);
      token_in_rank |= ((1u << c.shape.tp) - 1) << holder;
    }
    rows += std::popcount(token_in_rank & ~(1u << c.comm.rank()));
  }
  return rows;
}

/// Candidates of both passes.
struct Passes {
  size_t forward = 0, backward = 0;
};

/// Each candidate of a pass with the first one of the other; or, with `pairs`, with all of them.
std::vector<Passes> list_passes(const MoeOnGpus& layer, bool pairs = false) {
  const size_t backward = std::max<size_t>(1, layer.backward_candidates().size());
  std::vector<Passes> all;
  for (size_t i = 0; i < layer.candidates().size(); ++i) all.push_back({i, 0});
  for (size_t i = 1; i < backward; ++i) {
    for (size_t f = 0; f < (pairs ? layer.candidates().size() : 1); ++f) all.push_back({f, i});
  }
  return all;
}

std::string describe(const MoeOnGpus& layer, const Passes& passes) {
  const std::string& forward = layer.candidates()[passes.forward].name;
  if (passes.backward == 0) return forward;
  return fmt::format("{}; backward {}", forward, layer.backward_candidates()[passes.backward].name);
}

Strategy find_form(const MoeOnGpus& layer, const Passes& passes) {
  if (passes.backward > 0) return layer.backward_candidates()[passes.backward].form;
  return layer.candidates()[passes.forward].form;
}

void run_once(MoeOnGpus& layer, const Passes& passes, const MoeCase& c,
              const MoeBackwardCase* backward) {
  layer.run(passes.forward, c.x, c.routing, c.w_in, c.w_out, c.out,
            backward ? backward->saved.get() : nullptr);
  if (backward) backward->run(layer, passes.backward);
}

/// Checks that repeated runs of the encoded or of the uncompressed candidates are bitwise equal,
/// and samples of the last one.
void check_candidates(MoeOnGpus& layer, const MoeCase& c, const Wire& wire,
                      const MoeBackwardCase* backward, BenchResult& result) {
  uint64_t first = 0;
  bool equal = true;
  int runs = 0;
  for (const Passes& passes : list_passes(layer, true)) {
    if (layer.candidates()[passes.forward].encoded == wire.is_none()) continue;
    for (int i = 0, count = runs == 0 ? kEqualRuns : 2; i < count; ++i) {
      poison(c.out, c.comm.stream());
      if (backward) backward->reset();
      run_once(layer, passes, c, backward);
      c.comm.synchronize();
      const uint64_t bits = digest(c.out, c.comm.stream()) ^ (backward ? backward->digests() : 0);
      if (runs++ == 0) first = bits;
      equal = equal && bits == first;
    }
  }
  const auto worst = c.comm.slowest(std::vector<double>{
      std::max(worst_error(c, wire), backward ? backward->worst_error() : 0), equal ? 0.0 : 1.0});
  // Roundings: inside, of an expert's result, of a rank's sum, and of the final result; in the
  // backward pass two more before the weights' gradients.
  const double bound = (backward ? 5 : 3) * 0x1p-8 + (wire.is_none() ? 0 : error_of_sums(c, wire));
  result.max_rel = std::max(result.max_rel, worst[0]);
  result.of_bound = std::max(result.of_bound, worst[0] / bound);
  result.finite = result.finite && std::isfinite(worst[0]);
  result.bitwise_equal_runs = result.bitwise_equal_runs && worst[1] == 0;
}

/// Runs before those of candidates: GEMMs alone, and the wire.
constexpr size_t kBareRuns = 2;

/// The fastest uncompressed candidate of each pass; `times` are those of the bare runs, then of
/// `measured`.
Passes find_fastest(const MoeOnGpus& layer, const std::vector<Passes>& measured,
                    const std::vector<Timing>& times) {
  Passes best;
  double forward_us = times[kBareRuns].median_us, backward_us = forward_us;
  for (size_t i = 1; i < measured.size(); ++i) {
    const double us = times[i + kBareRuns].median_us;
    if (layer.candidates()[measured[i].forward].encoded) continue;
    if (measured[i].backward == 0 && us < forward_us) {
      best.forward = measured[i].forward, forward_us = us;
    }
    if (measured[i].backward > 0 && us < backward_us) {
      best.backward = measured[i].backward, backward_us = us;
    }
  }
  return best;
}

using NamedRuns = std::vector<std::pair<std::string, std::function<void()>>>;

struct MeasuredPasses {
  std::vector<Passes> passes;
  std::vector<Timing> times;  ///< of the bare runs, then of `passes`
};

/// Times the bare `runs` and the candidates of each pass; then, if some are faster than the first,
/// the fastest pair of them, with the bare runs and the serial forms in the same rounds.
MeasuredPasses measure_passes(const Setting& at, const MoeOnGpus& layer, NamedRuns runs,
                              const std::function<void(const Passes&)>& run) {
  const cudaStream_t stream = at.comm.stream();
  std::vector<Passes> measured = list_passes(layer);
  for (const Passes& passes : measured) {
    runs.emplace_back(describe(layer, passes), [&, passes] { run(passes); });
  }
  std::vector<std::unique_ptr<Graph>> graphs;
  std::vector<BoundCandidate> alternatives;
  const auto add_alternative = [&](const std::string& name, const std::function<void()>& call) {
    graphs.push_back(std::make_unique<Graph>(stream, call));
    graphs.back()->upload(stream);
    alternatives.push_back(
        {.name = name, .run = [graph = graphs.back().get(), stream] { graph->launch(stream); }});
  };
  for (const auto& [name, call] : runs) add_alternative(name, call);
  at.comm.synchronize();
  auto times = at.stopwatch.measure(alternatives, at.options);
  const Passes best = find_fastest(layer, measured, times);
  if (best.forward == 0 || best.backward == 0) return {measured, times};
  measured.push_back(best);
  times.emplace_back();
  add_alternative(describe(layer, best), [&] { run(best); });
  std::vector<size_t> again;
  for (size_t i = 0; i < times.size(); ++i) {
    const bool is_new = i + 1 == times.size();
    if (i < kBareRuns || is_new || find_form(layer, measured[i - kBareRuns]) == Strategy::serial) {
      again.push_back(i);
    }
  }
  std::vector<BoundCandidate> compared;
  for (const size_t i : again) compared.push_back(alternatives[i]);
  const auto of_again = at.stopwatch.measure(compared, at.options);
  for (size_t i = 0; i < again.size(); ++i) times[again[i]] = of_again[i];
  return {measured, times};
}

/// The GEMMs of a pass, or of both, alone.
void run_gemms(MoeOnGpus& layer, const MoeCase& c, const MoeBackwardCase* backward) {
  if (!backward) return layer.multiply_alone(c.x, c.w_in, c.w_out);
  const MoeOnGpus::GradientsAlone gradients{*backward->saved, backward->dw_in, backward->dw_out,
                                            WeightGradients::store};
  layer.multiply_alone(c.x, c.w_in, c.w_out, &gradients);
}

}  // namespace

void run_moe(const Setting& at, const BenchRequest& request, BenchResult& result) {
  BenchRequest q = request;
  complete_moe(q, at.comm.size());
  if (!find_moe(q.op)->is_layer() || q.dtype != DType::bf16) {
    throw Unsupported(
        fmt::format("bench {} {} on GPUs: expected moe, bf16", q.op, name_of(q.dtype)));
  }
  const MoeCase c(at.comm, q);
  const MoeOptions options{.dispatch = q.wire,
                           .combine = q.wire,
                           .allow_uncompressed = !q.wire.is_none(),
                           .backward = q.moe.backward};
  MoeOnGpus layer(at.comm, c.shape, options, Choosing::first);
  std::optional<MoeBackwardCase> backward;
  if (q.moe.backward) backward.emplace(c, layer);
  const MoeBackwardCase* const back = backward ? &*backward : nullptr;
  check_candidates(layer, c, {}, back, result);
  const int64_t rows = 2 * sent_rows(c);
  result.bytes = rows * int64_t(c.coords.row_bytes) * (back ? 2 : 1);
  if (!q.wire.is_none() && at.comm.size() > 1) {
    check_candidates(layer, c, q.wire, back, result);
    result.wire_bytes = rows * int64_t(q.wire.bytes(c.shape.hidden, c.shape.dtype));
  }
  const int others = std::max(1, at.comm.size() - 1);
  const auto largest = at.comm.slowest(std::vector<double>{double(result.bytes) / others});
  const size_t peer_bytes = size_t(largest[0]) / 16 * 16;
  const auto landing =
      std::static_pointer_cast<GpuBuffer>(at.comm.allocate(peer_bytes * size_t(at.comm.size()), 0));
  const DeviceMemory source(peer_bytes);
  const PacedCopies paced(at.comm.link_pacer());
  const cudaStream_t stream = at.comm.stream();
  NamedRuns runs{{"gemm", [&] { run_gemms(layer, c, back); }},
                 {"wire", [&] {
                    paced.begin(int64_t(peer_bytes) * (at.comm.size() - 1), stream);
                    for (int step = 1; step < at.comm.size(); ++step) {
                      const int to = schedule::moe_target(at.comm.rank(), at.comm.size(), step);
                      check(
                          cudaMemcpyAsync(landing->peer(to) + size_t(at.comm.rank()) * peer_bytes,
                                          source.data(), source.bytes(), cudaMemcpyDefault, stream),
                          "wire");
                    }
                    paced.end(stream);
                  }}};
  const auto [measured, times] = measure_passes(
      at, layer, std::move(runs), [&](const Passes& of) { run_once(layer, of, c, back); });
  result.graph = true;
  if (back) result.saved_bytes = int64_t(back->saved->bytes());
  result.gemm = times_of(times[0]);
  result.wire = times_of(times[1]);
  for (size_t i = 0; i < measured.size(); ++i) {
    result.add(describe(layer, measured[i]), find_form(layer, measured[i]),
               times_of(times[i + kBareRuns]), layer.candidates()[measured[i].forward].encoded);
  }
}

}  // namespace tandem::gpu
