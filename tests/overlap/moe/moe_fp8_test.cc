// Experts whose GEMMs multiply e4m3 rows: both passes against a slow reference that multiplies the
// same codes, and the bytes of rows that are sent as codes.
#include <gtest/gtest.h>

#include <cmath>

#include "gemm/gemm.h"
#include "overlap/moe/cpu/layer.h"
#include "overlap/moe/quantization.h"
#include "tandem/error.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"
#include "tests/overlap/moe/layer_case.h"

namespace tandem {
namespace {

using namespace tandem::test;

/// Row-major [rows, columns].
struct Matrix {
  int64_t rows = 0, columns = 0;
  std::vector<float> values;
  Matrix(int64_t r, int64_t c) : rows(r), columns(c), values(size_t(r * c)) {}
  Matrix(int64_t r, int64_t c, std::vector<float> v) : rows(r), columns(c), values(std::move(v)) {}
  float& at(int64_t i, int64_t j) { return values[size_t(i * columns + j)]; }
  double at(int64_t i, int64_t j) const { return double(values[size_t(i * columns + j)]); }
};

/// Values of the codes of the rows.
Matrix coded(Matrix m) {
  std::vector<Float8E4M3> codes(m.values.size());
  std::vector<float> scales(size_t(m.rows));
  const Tensor of_codes(codes.data(), DType::e4m3, {m.rows, m.columns});
  const Tensor of_scales(scales.data(), DType::f32, {m.rows});
  const Tensor values = Tensor::of(std::span(m.values), {m.rows, m.columns});
  quantize_rows(Exec{}, values, of_codes, of_scales);
  dequantize_rows(of_codes, of_scales, values);
  return m;
}
Matrix transposed(const Matrix& m) {
  Matrix t(m.columns, m.rows);
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.columns; ++j) t.at(j, i) = float(m.at(i, j));
  }
  return t;
}
/// Row of a x b^T.
std::vector<double> product(const Matrix& a, int64_t row, const Matrix& b) {
  std::vector<double> result(size_t(b.rows));
  for (int64_t j = 0; j < b.rows; ++j) {
    for (int64_t k = 0; k < b.columns; ++k) result[size_t(j)] += a.at(row, k) * b.at(j, k);
  }
  return result;
}
Matrix one_row(const std::vector<double>& values) {
  return {1, int64_t(values.size()), {values.begin(), values.end()}};
}

struct Expected {
  std::vector<double> out;
  MoeGradients gradients;
};

/// Adds the shard [begin, begin + count) of an expert's width, which quantizes by itself.
void add_shard(const Whole& whole, int64_t expert, const Shard& shard, Expected& to) {
  const LayerCase& c = whole.c;
  const int64_t f = shard.count;
  Matrix w_in(2 * f, c.hidden), w_out(c.hidden, f);
  const auto in_at = [&](int64_t i) {
    return (expert * 2 * c.ffn + (i < f ? 0 : c.ffn) + shard.begin + i % f) * c.hidden;
  };
  const auto out_at = [&](int64_t h) { return (expert * c.hidden + h) * c.ffn + shard.begin; };
  for (int64_t i = 0; i < 2 * f; ++i) {
    for (int64_t h = 0; h < c.hidden; ++h) w_in.at(i, h) = whole.w_in[size_t(in_at(i) + h)];
  }
  for (int64_t h = 0; h < c.hidden; ++h) {
    for (int64_t i = 0; i < f; ++i) w_out.at(h, i) = whole.w_out[size_t(out_at(h) + i)];
  }
  const Matrix in = coded(w_in), out = coded(w_out), in_back = coded(transposed(w_in)),
               out_back = coded(transposed(w_out)), x = coded({c.rows, c.hidden, whole.x}),
               dout = coded({c.rows, c.hidden, whole.dout});
  for (int64_t at = 0; at < c.rows * c.top_k; ++at) {
    if (whole.chosen[size_t(at)] != expert) continue;
    const int64_t row = at / c.top_k;
    const double weight = double(whole.weights[size_t(at)]);
    const std::vector<double> h = product(x, row, in), d_act = product(dout, row, out_back);
    std::vector<double> inner, dh(size_t(2 * f));
    for (size_t i = 0; i < size_t(f); ++i) {
      const double gate = h[i], up = h[size_t(f) + i], s = 1 / (1 + std::exp(-gate));
      inner.push_back(gate * s * up);
      dh[i] = weight * d_act[i] * up * s * (1 + gate * (1 - s));
      dh[size_t(f) + i] = weight * d_act[i] * gate * s;
      to.gradients.dweights[size_t(at)] += d_act[i] * inner[i];
    }
    const std::vector<double> y = product(coded(one_row(inner)), 0, out),
                              dx = product(coded(one_row(dh)), 0, in_back);
    for (int64_t j = 0; j < c.hidden; ++j) {
      to.out[size_t(row * c.hidden + j)] += weight * y[size_t(j)];
      to.gradients.dx[size_t(row * c.hidden + j)] += dx[size_t(j)];
      for (int64_t i = 0; i < 2 * f; ++i) {
        to.gradients.dw_in[size_t(in_at(i) + j)] += dh[size_t(i)] * x.at(row, j);
      }
      for (int64_t i = 0; i < f; ++i) {
        to.gradients.dw_out[size_t(out_at(j) + i)] += weight * inner[size_t(i)] * dout.at(row, j);
      }
    }
  }
}

Expected reference(const Whole& whole) {
  const LayerCase& c = whole.c;
  Expected expected{
      std::vector<double>(whole.x.size()),
      {std::vector<double>(whole.x.size()), std::vector<double>(whole.weights.size()),
       std::vector<double>(whole.w_in.size()), std::vector<double>(whole.w_out.size())}};
  for (int64_t expert = 0; expert < c.experts; ++expert) {
    for (int rank = 0; rank < c.tp; ++rank) {
      add_shard(whole, expert, shard_of(c.ffn, c.tp, rank), expected);
    }
  }
  return expected;
}

/// A layer with the weights of `rank`.
struct QuantizedLayer {
  QuantizedLayer(Communicator& comm, const RankLayer& rank, MoeOptions options,
                 bool has_scales = true)
      : codes(rank.w_in.tensor, rank.w_out.tensor,
              std::max<int64_t>(1, rank.w_out.tensor.dim(0) / rank.x.tensor.dim(1)), has_scales) {
    options.quantization = &codes.quantization();
    layer.emplace(comm, rank.shape(), options);
  }
  FixedQuantization codes;
  std::optional<MoeLayer> layer;
};

/// Sums in f32, but for a code that they round to the other side.
constexpr double kBound = 0.01;

TEST(MoeFp8, PassesAreThoseOfTheSameCodes) {
  TANDEM_SKIP_UNDER_MPI("threads");
  for (const int ranks : {1, 2, 4}) {
    for (LayerCase c : generated(ranks, 8)) {
      c.dtype = DType::f32;  // no rounding but that of the codes
      c.rows = std::max<int64_t>(c.rows, 8);
      const Whole whole(c);
      const Expected expected = reference(whole);
      const std::vector<double> exact = moe_reference(whole.problem());
      const MoeGradients exact_gradients = moe_reference_backward(whole.problem(), whole.dout);
      WorldOptions options;
      options.ranks = ranks;
      run_threads(options, [&](Communicator& comm) {
        set_kernel_threads(1);
        RankLayer rank(whole, comm.rank());
        std::vector<std::vector<float>> first;
        for (const MoeSave save : {MoeSave::sorted, MoeSave::rows, MoeSave::recompute}) {
          for (const Strategy strategy : {Strategy::serial, Strategy::overlapped}) {
            MoeOptions of{strategy, strategy == Strategy::serial ? 0 : 2};
            of.save = save;
            QuantizedLayer quantized(comm, rank, of);
            MoeBatch batch;
            quantized.layer->prepare(batch);
            rank.run(*quantized.layer, batch);
            if (first.empty()) {
              EXPECT_LE(rank.error(expected.out, expected.gradients), kBound) << c.describe();
              EXPECT_GT(rank.error(exact, exact_gradients), kBound)
                  << "nothing is rounded: " << c.describe();
              first = rank.results();
            } else if (rows_keep_bits() || strategy == Strategy::serial) {
              EXPECT_EQ(rank.results(), first) << c.describe() << " save " << name_of(save);
            }
          }
        }
      });
      if (HasFailure()) return;
    }
  }
}

// Rows of small gradients are lost without scales.
TEST(MoeFp8, CodesWithoutScalesAreWorse) {
  TANDEM_SKIP_UNDER_MPI("threads");
  Whole whole({.ep = 2, .experts = 4, .top_k = 2, .rows = 24, .hidden = 32, .ffn = 16});
  for (float& value : whole.dout) value *= 0x1p-12f;
  const std::vector<double> exact = moe_reference(whole.problem());
  const MoeGradients gradients = moe_reference_backward(whole.problem(), whole.dout);
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    set_kernel_threads(1);
    RankLayer rank(whole, comm.rank());
    std::vector<double> errors;
    for (const bool has_scales : {true, false}) {
      QuantizedLayer quantized(comm, rank, {Strategy::serial}, has_scales);
      MoeBatch batch;
      rank.run(*quantized.layer, batch);
      errors.push_back(rank.error(exact, gradients));
    }
    EXPECT_LT(errors[0], 0.15);
    EXPECT_GT(errors[1], 3 * errors[0]);
  });
}

TEST(MoeFp8, SentRowsAreCodesAndAScale) {
  TANDEM_SKIP_UNDER_MPI("threads");
  for (const LayerCase& c : {LayerCase{.ep = 2, .experts = 4, .top_k = 2, .rows = 40, .hidden = 24},
                             LayerCase{.tp = 2, .experts = 3, .top_k = 1, .rows = 17, .hidden = 40},
                             LayerCase{.ep = 2, .tp = 2, .experts = 6, .top_k = 3, .rows = 33}}) {
    const Whole whole(c);
    WorldOptions options;
    options.ranks = c.world();
    run_threads(options, [&](Communicator& comm) {
      set_kernel_threads(1);
      RankLayer rank(whole, comm.rank());
      int64_t copies = 0;  // of this rank's rows on other ranks
      const schedule::MoeGrid grid{c.experts, c.ep, c.tp};
      for (int64_t row = 0; row < rank.x.tensor.dim(0); ++row) {
        std::vector<int> has_row(size_t(c.world()));
        for (int k = 0; k < c.top_k; ++k) {
          const int32_t expert = rank.chosen[size_t(row * c.top_k + k)];
          for (int t = 0; expert >= 0 && t < c.tp; ++t)
            has_row[size_t(grid.holder(expert) + t)] = 1;
        }
        for (int other = 0; other < c.world(); ++other) {
          if (other != comm.rank()) copies += has_row[size_t(other)];
        }
      }
      const auto sent = [&](MoeLayer& layer) {
        MoeBatch batch;
        const uint64_t before = comm.bytes_sent();
        rank.run(layer, batch);
        return int64_t(comm.bytes_sent() - before);
      };
      MoeLayer exact(comm, rank.shape(), {Strategy::serial});
      QuantizedLayer quantized(comm, rank, {Strategy::serial});
      const int64_t of_row = 4 * c.hidden - (c.hidden + 4);
      EXPECT_EQ(sent(exact) - sent(*quantized.layer), 2 * copies * of_row) << c.describe();
      EXPECT_GT(copies, 0);
    });
  }
}

TEST(MoeFp8, TheTunerTimesItsOwnWeights) {
  TANDEM_SKIP_UNDER_MPI("threads");
  const Whole whole({.ep = 2, .experts = 4, .top_k = 2, .rows = 24, .hidden = 32, .ffn = 16});
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    set_kernel_threads(1);
    RankLayer rank(whole, comm.rank());
    std::vector<std::vector<float>> serial;
    for (const Strategy strategy : {Strategy::serial, Strategy::automatic}) {
      QuantizedLayer quantized(comm, rank, {strategy});
      MoeBatch batch;
      rank.run(*quantized.layer, batch);
      if (serial.empty()) serial = rank.results();
      if (rows_keep_bits()) {
        EXPECT_EQ(rank.results(), serial);
      }
    }
  });
}

TEST(MoeFp8, AgreedOnAndWithoutAFormatOfSentRows) {
  TANDEM_SKIP_UNDER_MPI("threads");
  const Whole whole({.ep = 2, .experts = 4, .top_k = 2, .rows = 8, .hidden = 32, .ffn = 16});
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    RankLayer rank(whole, comm.rank());
    const FixedQuantization codes(rank.w_in.tensor, rank.w_out.tensor, 2, true);
    MoeOptions of{Strategy::serial};
    if (comm.rank() == 1) of.quantization = &codes.quantization();
    const std::string error = error_of<Mismatch>([&] { MoeLayer(comm, rank.shape(), of); });
    EXPECT_NE(error.find(" in e4m3"), std::string::npos) << error;
    of.quantization = &codes.quantization();
    of.dispatch = {Codec::int8, 32};
    EXPECT_EQ(
        error_of<InvalidArgument>([&] { MoeLayer(comm, rank.shape(), of); }),
        "moe: dispatch codec 'int8:g32' with e4m3 experts: expected none, as rows are sent as "
        "e4m3");
  });
}

}  // namespace
}  // namespace tandem
