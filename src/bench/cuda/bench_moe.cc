// A Mixture-of-Experts layer on GPU ranks, in every way that it can be run, as CUDA graphs. Sampled
// rows are compared with sums in f64 on the host; all ways must give the same bits.
#include "bench/bench_moe.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "bench/cuda/bench_setting.h"
#include "bench/cuda/verify.h"
#include "core/cuda/graph.h"
#include "overlap/cuda/moe_on_gpus.h"
#include "overlap/moe_load.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

constexpr int64_t kSampledRows = 2, kSampledColumns = 32;
// An expert's gate, its up projection, and its part of w_out on each of the TP ranks.
constexpr uint64_t kGate = 1000, kUp = 100000, kDown = 200000;

struct MoeCase {
  MoeCase(GpuCommunicator& of, const BenchRequest& q)
      : comm(of),
        shape{.tokens = shard_of(q.m, of.size(), 0).count,
              .hidden = q.k,
              .ffn = q.n,
              .experts = q.moe.experts,
              .top_k = q.moe.top_k,
              .tp = q.moe.tp,
              .dtype = q.dtype},
        place(of, shape),
        own(shard_of(q.m, of.size(), of.rank())),
        chosen(chosen_experts(place.grid, q.moe.top_k, {q.moe.imbalance, 1}, own.begin, own.count)),
        x_memory(bytes(own.count * q.k)),
        in_memory(bytes(place.experts.count * 2 * place.ffn * q.k)),
        down_memory(bytes(place.experts.count * q.k * place.ffn)),
        result_memory(bytes(own.count * q.k)),
        experts_memory(chosen.size() * sizeof chosen[0]),
        weights_memory(chosen.size() * sizeof(float)),
        x(x_memory.view(q.dtype, {own.count, q.k})),
        w_in(in_memory.view(q.dtype, {place.experts.count * 2 * place.ffn, q.k})),
        w_out(down_memory.view(q.dtype, {place.experts.count * q.k, place.ffn})),
        out(result_memory.view(q.dtype, {own.count, q.k})),
        routing{experts_memory.view(DType::i32, {own.count, q.moe.top_k}),
                weights_memory.view(DType::f32, {own.count, q.moe.top_k})} {
    const std::vector<float> weights(chosen.size(), weight());
    write(experts_memory, chosen.data());
    write(weights_memory, weights.data());
    fill_uniform(x, kSeed, kX + uint64_t(comm.rank()), 0, comm.stream());
    const int64_t f = place.ffn;
    for (int64_t e = 0; e < place.experts.count; ++e) {
      const auto number = uint64_t(place.experts.begin + e);
      fill_uniform(w_in.rows(e * 2 * f, f), kSeed, kGate + number, first_of_part() * q.k,
                   comm.stream());
      fill_uniform(w_in.rows((e * 2 + 1) * f, f), kSeed, kUp + number, first_of_part() * q.k,
                   comm.stream());
      fill_uniform(w_out.rows(e * q.k, q.k), kSeed, down_stream(number, comm.rank() % shape.tp), 0,
                   comm.stream());
    }
    comm.synchronize();
  }

  static size_t bytes(int64_t values) { return size_t(values) * 2; }
  float weight() const { return 1.0f / float(shape.top_k); }
  int64_t first_of_part() const {
    return shard_of(shape.ffn, shape.tp, comm.rank() % shape.tp).begin;
  }
  uint64_t down_stream(uint64_t expert, int part) const {
    return kDown + expert * uint64_t(shape.tp) + uint64_t(part);
  }
  void write(const DeviceMemory& memory, const void* host) const {
    check(
        cudaMemcpyAsync(memory.data(), host, memory.bytes(), cudaMemcpyHostToDevice, comm.stream()),
        "write a routing");
    comm.synchronize();
  }

  GpuCommunicator& comm;
  MoeShape shape;
  MoePlace place;
  Shard own;
  std::vector<int32_t> chosen;
  DeviceMemory x_memory, in_memory, down_memory, result_memory, experts_memory, weights_memory;
  Tensor x, w_in, w_out, out;
  MoeRouting routing;
};

std::vector<double> read(const MoeCase& c, const Tensor& values) {
  std::vector<BFloat16> bits(size_t(values.elements()));
  check(cudaMemcpyAsync(bits.data(), values.data(), values.bytes(), cudaMemcpyDeviceToHost,
                        c.comm.stream()),
        "read");
  c.comm.synchronize();
  std::vector<double> host;
  for (const BFloat16 value : bits) host.push_back(double(value.to_float()));
  return host;
}

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

/// Some columns of what one of all experts makes of `row`, whose weights are made again.
std::vector<double> expert_result(const MoeCase& c, int32_t expert, const std::vector<double>& row,
                                  const Tensor& scratch) {
  const MoeShape& s = c.shape;
  const auto made = [&](uint64_t stream, int64_t rows, int64_t columns) {
    const Tensor matrix(scratch.data(), s.dtype, {rows, columns}, scratch.device());
    fill_uniform(matrix, kSeed, stream, 0, c.comm.stream());
    return read(c, matrix);
  };
  const auto gate = made(kGate + uint64_t(expert), s.ffn, s.hidden),
             up = made(kUp + uint64_t(expert), s.ffn, s.hidden);
  std::vector<double> inner(static_cast<size_t>(s.ffn)), result(size_t(kSampledColumns), 0.0);
  for (int64_t f = 0; f < s.ffn; ++f) {
    const double g = dot(&gate[size_t(f * s.hidden)], row.data(), s.hidden);
    inner[size_t(f)] =
        g / (1 + std::exp(-g)) * dot(&up[size_t(f * s.hidden)], row.data(), s.hidden);
  }
  for (int part = 0; part < s.tp; ++part) {
    const Shard mine = shard_of(s.ffn, s.tp, part);
    const auto down = made(c.down_stream(uint64_t(expert), part), s.hidden, mine.count);
    for (int64_t i = 0; i < kSampledColumns; ++i) {
      const int64_t column = i * s.hidden / kSampledColumns;
      result[size_t(i)] +=
          dot(&down[size_t(column * mine.count)], &inner[size_t(mine.begin)], mine.count);
    }
  }
  return result;
}

/// Largest error of sampled results over the largest of them.
double worst_error(const MoeCase& c) {
  const MoeShape& s = c.shape;
  const DeviceMemory memory(MoeCase::bytes(s.ffn * s.hidden));
  const Tensor scratch = memory.view(s.dtype, {s.ffn, s.hidden});
  double worst = 0, largest = 0;
  for (int64_t sample = 0; sample < std::min(kSampledRows, c.own.count); ++sample) {
    const int64_t row = (2 * sample + 1) * c.own.count / (2 * kSampledRows);
    const auto x = read(c, c.x.rows(row, 1)), found = read(c, c.out.rows(row, 1));
    std::vector<double> expected(size_t(kSampledColumns), 0.0);
    for (int k = 0; k < s.top_k; ++k) {
      const auto of_one = expert_result(c, c.chosen[size_t(row * s.top_k + k)], x, scratch);
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

/// Bytes that this rank sends: its rows, and as many sums as it is sent rows, by their mean.
int64_t sent_bytes(const MoeCase& c) {
  int64_t rows = 0;
  for (int64_t row = 0; row < c.own.count; ++row) {
    unsigned goes = 0;
    for (int k = 0; k < c.shape.top_k; ++k) {
      const int holder = c.place.grid.holder(c.chosen[size_t(row * c.shape.top_k + k)]);
      goes |= ((1u << c.shape.tp) - 1) << holder;
    }
    rows += std::popcount(goes & ~(1u << c.comm.rank()));
  }
  return rows * int64_t(c.place.line) * 2;
}

/// Some runs of every way, all with the same bits, and sampled rows of the last one.
void check_ways(MoeOnGpus& layer, const MoeCase& c, BenchResult& result) {
  uint64_t first = 0;
  bool equal = true;
  for (size_t way = 0; way < layer.ways().size(); ++way) {
    for (int i = 0; i < (way == 0 ? kEqualRuns : 2); ++i) {
      poison(c.out, c.comm.stream());
      layer.run(way, c.x, c.routing, c.w_in, c.w_out, c.out);
      c.comm.synchronize();
      const uint64_t bits = digest(c.out, c.comm.stream());
      if (way == 0 && i == 0) first = bits;
      equal = equal && bits == first;
    }
  }
  const auto worst = c.comm.slowest(std::vector<double>{worst_error(c), equal ? 0.0 : 1.0});
  // Rounded inside, as an expert's result, as a rank's sum, and at the end.
  constexpr double kBound = 3 * 0x1p-8;
  result.max_rel = worst[0];
  result.of_bound = worst[0] / kBound;
  result.finite = std::isfinite(worst[0]);
  result.bitwise_equal_runs = worst[1] == 0;
}

}  // namespace

void run_moe(const Setting& at, const BenchRequest& request, BenchResult& result) {
  BenchRequest q = request;
  complete_moe(q, at.comm.size());
  if (q.op != "moe" || q.moe.backward || q.dtype != DType::bf16 || !q.wire.is_none()) {
    throw Unsupported(fmt::format("bench {}{} {}{} on GPUs: expected moe, forward, bf16, no codec",
                                  q.op, q.moe.backward ? " --backward" : "", name_of(q.dtype),
                                  q.wire.is_none() ? "" : " --codec " + q.wire.describe()));
  }
  const MoeCase c(at.comm, q);
  MoeOnGpus layer(at.comm, c.shape, {}, Choosing::first);
  check_ways(layer, c, result);
  result.bytes = sent_bytes(c);
  const int others = std::max(1, at.comm.size() - 1);
  const auto largest = at.comm.slowest(std::vector<double>{double(result.bytes) / others});
  const size_t peer_bytes = size_t(largest[0]) / 16 * 16;
  const auto landing =
      std::static_pointer_cast<GpuBuffer>(at.comm.allocate(peer_bytes * size_t(at.comm.size()), 0));
  const DeviceMemory source(peer_bytes);
  const cudaStream_t stream = at.comm.stream();
  std::vector<std::pair<std::string, std::function<void()>>> runs{
      {"gemm", [&] { layer.multiply_alone(c.x, c.w_in, c.w_out); }},
      {"wire", [&] {
         for (int step = 1; step < at.comm.size(); ++step) {
           const int to = schedule::moe_target(at.comm.rank(), at.comm.size(), step);
           check(
               cudaMemcpyAsync(landing->peer(to) + size_t(at.comm.rank()) * peer_bytes,
                               source.data(), source.bytes(), cudaMemcpyDefault, at.comm.stream()),
               "wire");
         }
       }}};
  for (size_t way = 0; way < layer.ways().size(); ++way) {
    runs.emplace_back(layer.ways()[way].describe(),
                      [&, way] { layer.run(way, c.x, c.routing, c.w_in, c.w_out, c.out); });
  }
  std::vector<std::unique_ptr<Graph>> graphs;
  std::vector<Alternative> alternatives;
  for (const auto& [name, run] : runs) {
    graphs.push_back(std::make_unique<Graph>(stream, run));
    graphs.back()->upload(stream);
    alternatives.push_back(
        {name, [graph = graphs.back().get(), stream] { graph->launch(stream); }});
  }
  at.comm.synchronize();
  const auto times = at.stopwatch.measure(alternatives, at.options);
  result.graph = true;
  result.gemm = times_of(times[0]);
  result.wire = times_of(times[1]);
  for (size_t way = 0; way < layer.ways().size(); ++way) {
    const Form form = layer.ways()[way].is_serial() ? Form::serial : Form::overlapped;
    result.add(runs[way + 2].first, form, times_of(times[way + 2]));
  }
}

}  // namespace tandem::gpu
