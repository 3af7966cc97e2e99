// Backward pass of a Mixture-of-Experts layer on GPU ranks, for bench_moe.cc: samples of all
// gradients are compared with f64 sums on the host, over the rows of all ranks.
#include <algorithm>
#include <cmath>

#include "bench/cuda/moe_bench_case.h"
#include "bench/cuda/verify.h"
#include "bench/moe_gradients.h"

namespace tandem::gpu {
namespace {

constexpr uint64_t kDout = 150;  // like kX
constexpr int64_t kSamples = 16;

std::vector<float> read_floats(const MoeCase& c, const Tensor& from) {
  std::vector<float> host(size_t(from.elements()));
  check(cudaMemcpyAsync(host.data(), from.data(), from.bytes(), cudaMemcpyDeviceToHost,
                        c.comm.stream()),
        "read");
  c.comm.synchronize();
  return host;
}

/// Regenerates a rank's rows.
std::vector<double> rows_of(const MoeCase& c, uint64_t stream, int rank, int64_t count) {
  const DeviceMemory memory(MoeCase::bytes(count * c.shape.hidden));
  const Tensor rows = memory.view(c.shape.dtype, {count, c.shape.hidden});
  fill_uniform(rows, kSeed, stream + uint64_t(rank), 0, c.comm.stream());
  return read(c, rows);
}

/// Column `at` of a matrix with `columns` columns.
std::vector<double> column_of(const std::vector<double>& matrix, int64_t columns, int64_t at) {
  std::vector<double> column;
  for (size_t i = size_t(at); i < matrix.size(); i += size_t(columns)) column.push_back(matrix[i]);
  return column;
}

void check_row(const MoeBackwardCase& b, int64_t row, SampledErrors& of_dx,
               SampledErrors& of_dweights) {
  const MoeCase& c = b.c;
  const MoeShape& s = c.shape;
  const auto x = read(c, c.x.rows(row, 1)), dout = read(c, b.dout.rows(row, 1)),
             found = read(c, b.dx.rows(row, 1));
  const auto dweights = read_floats(c, b.dweights.rows(row, 1));
  std::vector<double> dx(size_t(s.hidden), 0.0);
  for (int k = 0; k < s.top_k; ++k) {
    const int32_t expert = c.chosen[size_t(row * s.top_k + k)];
    const auto gate = c.gate(expert), up = c.up(expert);
    double dot_of_all = 0;
    for (int tp_rank = 0; tp_rank < s.tp; ++tp_rank) {
      const Shard local = shard_of(s.ffn, s.tp, tp_rank);
      const auto down = c.down(expert, tp_rank);
      std::vector<double> d_act(size_t(local.count), 0.0);
      for (int64_t h = 0; h < s.hidden; ++h) {
        for (int64_t f = 0; f < local.count; ++f) {
          d_act[size_t(f)] += dout[size_t(h)] * down[size_t(h * local.count + f)];
        }
      }
      for (int64_t f = 0; f < local.count; ++f) {
        const double *of_gate = &gate[size_t((local.begin + f) * s.hidden)],
                     *of_up = &up[size_t((local.begin + f) * s.hidden)];
        const GateSample t(dot(of_gate, x.data(), s.hidden), dot(of_up, x.data(), s.hidden),
                           d_act[size_t(f)], double(c.weight()));
        dot_of_all += t.dot;
        for (int64_t h = 0; h < s.hidden; ++h) {
          dx[size_t(h)] += t.dgate * of_gate[h] + t.dup * of_up[h];
        }
      }
    }
    of_dweights.add(double(dweights[size_t(k)]), dot_of_all);
  }
  for (int64_t h = 0; h < s.hidden; ++h) of_dx.add(found[size_t(h)], dx[size_t(h)]);
}

/// Checks a feature of this rank's first expert, over all ranks' rows.
void check_feature(const MoeBackwardCase& b, int64_t feature, SampledErrors& of_in,
                   SampledErrors& of_out) {
  const MoeCase& c = b.c;
  const MoeShape& s = c.shape;
  const int tp_rank = c.comm.rank() % s.tp;
  const int64_t expert = c.coords.experts.begin;
  const auto gate = c.gate(expert), up = c.up(expert);
  const auto down = column_of(c.down(expert, tp_rank), c.coords.ffn, feature);
  const int64_t at_row = (c.first_feature() + feature) * s.hidden;
  const auto column = [&](int64_t i) { return i * s.hidden / kSamples; };
  std::vector<double> of_gate(size_t(kSamples), 0.0), of_up = of_gate, of_down = of_gate;
  for (int rank = 0; rank < c.comm.size(); ++rank) {
    const Shard rows = shard_of(c.all_tokens, c.comm.size(), rank);
    const std::vector<int32_t> chosen =
        chosen_experts(c.coords.grid, s.top_k, {c.imbalance, 1}, rows.begin, rows.count);
    const auto x = rows_of(c, kX, rank, rows.count), dout = rows_of(c, kDout, rank, rows.count);
    for (int64_t i = 0; i < int64_t(chosen.size()); ++i) {
      if (chosen[size_t(i)] != expert) continue;
      const double *row = &x[size_t(i / s.top_k * s.hidden)],
                   *drow = &dout[size_t(i / s.top_k * s.hidden)];
      const GateSample t(dot(&gate[size_t(at_row)], row, s.hidden),
                         dot(&up[size_t(at_row)], row, s.hidden), dot(down.data(), drow, s.hidden),
                         double(c.weight()));
      for (int64_t j = 0; j < kSamples; ++j) {
        of_gate[size_t(j)] += t.dgate * row[column(j)];
        of_up[size_t(j)] += t.dup * row[column(j)];
        of_down[size_t(j)] += t.scaled * drow[column(j)];
      }
    }
  }
  const auto found_gate = read_floats(c, b.dw_in.rows(feature, 1)),
             found_up = read_floats(c, b.dw_in.rows(c.coords.ffn + feature, 1));
  for (int64_t j = 0; j < kSamples; ++j) {
    of_in.add(double(found_gate[size_t(column(j))]), of_gate[size_t(j)]);
    of_in.add(double(found_up[size_t(column(j))]), of_up[size_t(j)]);
    of_out.add(double(read_floats(c, b.dw_out.rows(column(j), 1))[size_t(feature)]),
               of_down[size_t(j)]);
  }
}

}  // namespace

MoeBackwardCase::MoeBackwardCase(const MoeCase& of, const MoeOnGpus& layer)
    : c(of),
      saved(layer.make_saved()),
      dout_memory(MoeCase::bytes(c.x.elements())),
      dx_memory(dout_memory.bytes()),
      dweights_memory(c.weights_memory.bytes()),
      dw_in_memory(size_t(c.w_in.elements()) * 4),
      dw_out_memory(size_t(c.w_out.elements()) * 4),
      dout(dout_memory.view(c.shape.dtype, {c.local.count, c.shape.hidden})),
      dx(dx_memory.view(c.shape.dtype, {c.local.count, c.shape.hidden})),
      dweights(dweights_memory.view(DType::f32, {c.local.count, c.shape.top_k})),
      dw_in(dw_in_memory.view(DType::f32, {c.w_in.dim(0), c.w_in.dim(1)})),
      dw_out(dw_out_memory.view(DType::f32, {c.w_out.dim(0), c.w_out.dim(1)})) {
  fill_uniform(dout, kSeed, kDout + uint64_t(c.comm.rank()), 0, c.comm.stream());
  c.comm.synchronize();
}

void MoeBackwardCase::run(MoeOnGpus& layer, size_t candidate) const {
  layer.run_backward(candidate, dout, c.w_in, c.w_out, *saved, dx, dweights, dw_in, dw_out,
                     WeightGradients::store);
}

void MoeBackwardCase::reset() const {
  for (const Tensor& gradient : {dw_in, dw_out}) {
    check(cudaMemsetAsync(gradient.data(), 0xff, gradient.bytes(), c.comm.stream()), "poison");
  }
  poison(dx, c.comm.stream());
}

uint64_t MoeBackwardCase::digests() const {
  uint64_t all = 0;
  for (const Tensor& gradient : {dx, dweights, dw_in, dw_out}) {
    all = all * 31 + digest(gradient, c.comm.stream());
  }
  return all;
}

double MoeBackwardCase::worst_error() const {
  SampledErrors of_dx, of_dweights, of_in, of_out;
  if (c.local.count > 0) check_row(*this, c.local.count / 3, of_dx, of_dweights);
  check_feature(*this, c.coords.ffn / 3, of_in, of_out);
  return std::max({of_dx.value(), of_dweights.value(), of_in.value(), of_out.value()});
}

}  // namespace tandem::gpu
