#include "tests/overlap/moe/reference.h"

#include <cmath>

namespace tandem {
namespace {

double dot(const float* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double(a[i]) * b[i];
  return sum;
}

/// One row through one expert.
struct ExpertRow {
  std::vector<double> gate, up, inner;
  ExpertRow(const MoeProblem& p, int64_t row, int32_t expert)
      : gate(size_t(p.ffn)), up(size_t(p.ffn)), inner(size_t(p.ffn)) {
    const float* in = p.w_in.data() + expert * 2 * p.ffn * p.hidden;
    const float* x = p.x.data() + row * p.hidden;
    for (int64_t f = 0; f < p.ffn; ++f) {
      double g = 0, u = 0;
      for (int64_t h = 0; h < p.hidden; ++h) {
        g += double(in[f * p.hidden + h]) * double(x[h]);
        u += double(in[(p.ffn + f) * p.hidden + h]) * double(x[h]);
      }
      gate[size_t(f)] = g;
      up[size_t(f)] = u;
      inner[size_t(f)] = g / (1 + std::exp(-g)) * u;
    }
  }
};

void backward_row(const MoeProblem& p, int64_t row, int i, const float* dout, MoeGradients& g) {
  const int32_t expert = p.chosen[size_t(row * p.top_k + i)];
  if (expert < 0) return;
  const double weight = double(p.weights[size_t(row * p.top_k + i)]);
  const ExpertRow r(p, row, expert);
  const float* out = p.w_out.data() + expert * p.hidden * p.ffn;
  const int64_t in_at = expert * 2 * p.ffn * p.hidden, out_at = expert * p.hidden * p.ffn;
  const float* x = p.x.data() + row * p.hidden;
  for (int64_t f = 0; f < p.ffn; ++f) {
    double back = 0;
    for (int64_t h = 0; h < p.hidden; ++h) {
      back += double(out[h * p.ffn + f]) * double(dout[h]);
      g.dw_out[size_t(out_at + h * p.ffn + f)] += weight * double(dout[h]) * r.inner[size_t(f)];
    }
    g.dweights[size_t(row * p.top_k + i)] += back * r.inner[size_t(f)];
    const double d = weight * back, gate = r.gate[size_t(f)], s = 1 / (1 + std::exp(-gate));
    const double dgate = d * r.up[size_t(f)] * s * (1 + gate * (1 - s)), dup = d * gate * s;
    for (int64_t h = 0; h < p.hidden; ++h) {
      const int64_t at_gate = in_at + f * p.hidden + h, at_up = in_at + (p.ffn + f) * p.hidden + h;
      g.dw_in[size_t(at_gate)] += dgate * double(x[h]);
      g.dw_in[size_t(at_up)] += dup * double(x[h]);
      g.dx[size_t(row * p.hidden + h)] +=
          dgate * double(p.w_in[size_t(at_gate)]) + dup * double(p.w_in[size_t(at_up)]);
    }
  }
}

}  // namespace

std::vector<double> moe_reference(const MoeProblem& p) {
  std::vector<double> result(size_t(p.rows * p.hidden));
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int i = 0; i < p.top_k; ++i) {
      const int32_t expert = p.chosen[size_t(row * p.top_k + i)];
      if (expert < 0) continue;
      const double weight = double(p.weights[size_t(row * p.top_k + i)]);
      const ExpertRow r(p, row, expert);
      const float* out = p.w_out.data() + expert * p.hidden * p.ffn;
      for (int64_t h = 0; h < p.hidden; ++h) {
        result[size_t(row * p.hidden + h)] += weight * dot(out + h * p.ffn, r.inner.data(), p.ffn);
      }
    }
  }
  return result;
}

MoeGradients moe_reference_backward(const MoeProblem& p, std::span<const float> dout) {
  MoeGradients g{std::vector<double>(p.x.size()), std::vector<double>(p.weights.size()),
                 std::vector<double>(p.w_in.size()), std::vector<double>(p.w_out.size())};
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int i = 0; i < p.top_k; ++i) backward_row(p, row, i, dout.data() + row * p.hidden, g);
  }
  return g;
}

}  // namespace tandem
