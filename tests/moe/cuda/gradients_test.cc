// Gradients of an MoE layer on one GPU: grouped weight gradients are exact for numbers that allow
// it, and a backward pass matches the slow reference (f64).
#include <fmt/format.h>

#include <string>

#include "gemm/cuda/grouped_wgrad.h"
#include "overlap/moe/cuda/one_gpu.h"
#include "overlap/moe/load.h"
#include "tandem/error.h"
#include "tests/moe/cuda/values.h"
#include "tests/moe/reference.h"

namespace tandem::test {
namespace {

using namespace gpu;

TEST_F(GpuMoe, GroupedWeightGradientsOfWholeNumbersAreExact) {
  const std::vector<std::vector<int>> spreads{
      {1}, {64}, {65}, {128}, {129}, {0, 0, 7}, {300, 0, 1, 128, 5}, std::vector<int>(40, 33)};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const auto& counts : spreads) {
      for (const auto& [rows, columns] :
           {std::pair<int64_t, int64_t>{8, 8}, {128, 256}, {136, 264}, {1032, 40}, {72, 1000}}) {
        const std::string what = fmt::format("{} {} groups, first {}, {} x {}", name_of(dtype),
                                             counts.size(), counts[0], rows, columns);
        std::vector<schedule::GroupRows> group_rows;
        int padded = 0;
        for (const int count : counts) {
          group_rows.push_back({padded, count});
          padded += schedule::group_tiles(count, kGroupedRows) * kGroupedRows;
        }
        group_rows.push_back({padded, 0});
        const int more = 128;  // unused by any group
        auto dy = whole_numbers((padded + more) * rows, 1, 2),
             x = whole_numbers((padded + more) * columns, 2, 2);
        for (size_t g = 0; g < counts.size(); ++g) {
          const auto blank = [&](std::vector<float>& of, int64_t width) {
            std::fill(of.begin() + (group_rows[g].first + counts[g]) * width,
                      of.begin() + group_rows[g + 1].first * width, 0.0f);
          };
          blank(dy, rows);
          blank(x, columns);
        }
        const auto there = whole_numbers(int64_t(counts.size()) * rows * columns, 3, 100);
        const DeviceMemory on_dy = to_device(stored(dtype, dy)), on_x = to_device(stored(dtype, x)),
                           on_groups = to_device(group_rows), out = to_device(there);
        const auto wgrad = make_grouped_wgrad({.dtype = dtype,
                                               .groups = int(counts.size()),
                                               .padded_rows = padded + more,
                                               .rows = rows,
                                               .columns = columns});
        wgrad->launch({.dy = on_dy.data(),
                       .x = on_x.data(),
                       .group_rows = reinterpret_cast<schedule::GroupRows*>(on_groups.data()),
                       .dweight = reinterpret_cast<float*>(out.data())},
                      stream());
        const auto found = to_host<float>(out, there.size());
        for (size_t g = 0; g < counts.size(); ++g) {
          std::vector<float> expected(there.begin() + int64_t(g) * rows * columns,
                                      there.begin() + int64_t(g + 1) * rows * columns);
          for (int64_t r = group_rows[g].first; r < group_rows[g].first + counts[g]; ++r) {
            for (int64_t m = 0; m < rows; ++m) {
              const float by = dy[size_t(r * rows + m)];
              for (int64_t n = 0; n < columns; ++n) {
                expected[size_t(m * columns + n)] += by * x[size_t(r * columns + n)];
              }
            }
          }
          for (size_t i = 0; i < expected.size(); ++i) {
            ASSERT_EQ(found[g * expected.size() + i], expected[i])
                << what << ": group " << g << " row " << i / size_t(columns) << " column "
                << i % size_t(columns);
          }
        }
      }
    }
  }
}

TEST_F(GpuMoe, UnsupportedGradientsAreRejectedByName) {
  const auto refused = [](const WgradShape& shape) {
    try {
      make_grouped_wgrad(shape);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refused({.rows = 12, .columns = 8}).find("rows = 12"), std::string::npos);
  EXPECT_NE(refused({.rows = 8, .columns = 4}).find("columns = 4"), std::string::npos);
  EXPECT_NE(refused({.dtype = DType::f32, .rows = 8, .columns = 8}).find("f32"), std::string::npos);
}

TEST_F(GpuMoe, BackwardMatchesReference) {
  const auto slow = [](const LayerCase& c) {
    return c.shape.experts * c.shape.hidden * c.shape.ffn > 64 * 64 * 64 && c.rows > 17;
  };
  for (const LayerCase& c :
       layer_cases({{1, 1}, {4, 2}, {8, 2}, {64, 8}}, {{64, 64}, {200, 136}, {136, 328}}, slow)) {
    const MoeShape& s = c.shape;
    const std::string what = describe(c);
    const int64_t in = s.experts * 2 * s.ffn, out = s.experts * s.hidden;
    const auto bits = [&](int64_t count, uint64_t stream, float scale) {
      return stored(s.dtype, random_values(count, stream, scale));
    };
    const auto x = bits(c.rows * s.hidden, 13, 1), dout = bits(c.rows * s.hidden, 15, 1);
    const auto w_in = bits(in * s.hidden, 11, 0.1f), w_out = bits(out * s.ffn, 12, 0.1f);
    const auto weights = random_values(c.rows * s.top_k, 14, 1);
    const auto chosen = chosen_experts({s.experts, 1, 1}, s.top_k, {c.imbalance, 5}, 0, c.rows);
    const DeviceMemory on_x = to_device(x), on_dout = to_device(dout), on_in = to_device(w_in),
                       on_out = to_device(w_out), on_weights = to_device(weights),
                       on_experts = to_device(chosen), result(on_x.bytes()), dx(on_x.bytes() * 2),
                       dweights(weights.size() * 4), dw_in(w_in.size() * 4),
                       dw_out(w_out.size() * 4);
    LocalMoe layer(s, {.trains = true,
                       .pairs = (c.rows + s.experts) % 2 == 0,
                       .sorting_blocks = int((c.rows + s.hidden) % 3) * 4});
    const Tensor x_view = on_x.view(s.dtype, {c.rows, s.hidden}),
                 dout_view = on_dout.view(s.dtype, {c.rows, s.hidden}),
                 in_view = on_in.view(s.dtype, {in, s.hidden}),
                 out_view = on_out.view(s.dtype, {out, s.ffn});
    const MoeRouting routing{on_experts.view(DType::i32, {c.rows, s.top_k}),
                             on_weights.view(DType::f32, {c.rows, s.top_k})};
    layer.forward(x_view, routing, in_view, out_view, result.view(s.dtype, {c.rows, s.hidden}),
                  stream());
    const auto run = [&](DType dtype) {
      for (const DeviceMemory* memory : {&dx, &dweights}) {
        check(cudaMemsetAsync(memory->data(), 0xff, memory->bytes(), stream()), "poison");
      }
      layer.backward(dout_view, routing, in_view, out_view, dx.view(dtype, {c.rows, s.hidden}),
                     dweights.view(DType::f32, {c.rows, s.top_k}),
                     dw_in.view(DType::f32, {in, s.hidden}), dw_out.view(DType::f32, {out, s.ffn}),
                     stream());
    };
    run(s.dtype);
    const auto host_x = loaded(s.dtype, x), host_in = loaded(s.dtype, w_in),
               host_out = loaded(s.dtype, w_out), host_dout = loaded(s.dtype, dout);
    const MoeProblem problem{.rows = c.rows,
                             .hidden = s.hidden,
                             .ffn = s.ffn,
                             .experts = s.experts,
                             .top_k = s.top_k,
                             .chosen = chosen,
                             .weights = weights,
                             .x = host_x,
                             .w_in = host_in,
                             .w_out = host_out};
    const MoeGradients expected = moe_reference_backward(problem, host_dout);
    expect_near(moe_reference(problem), loaded(s.dtype, to_host<uint16_t>(result, x.size())),
                s.dtype, what + ": out", 1.5);
    const auto dx_bits = to_host<uint16_t>(dx, x.size());
    expect_near(expected.dx, loaded(s.dtype, dx_bits), s.dtype, what + ": dx", 2);
    const auto dw_in_once = to_host<float>(dw_in, w_in.size()),
               dw_out_once = to_host<float>(dw_out, w_out.size()),
               dweights_once = to_host<float>(dweights, weights.size());
    expect_near(expected.dweights, dweights_once, s.dtype, what + ": dweights", 2,
                dweight_size(s.hidden, s.ffn));
    expect_near(expected.dw_in, dw_in_once, s.dtype, what + ": dw_in", 2);
    expect_near(expected.dw_out, dw_out_once, s.dtype, what + ": dw_out", 2);
    // Weight gradients accumulate; the other outputs keep the same bits.
    run(DType::f32);
    expect_near(expected.dx, to_host<float>(dx, x.size()), s.dtype, what + ": dx, f32", 2);
    EXPECT_EQ(to_host<float>(dweights, weights.size()), dweights_once) << what;
    for (const auto& [memory, once] : {std::pair(&dw_in, &dw_in_once), {&dw_out, &dw_out_once}}) {
      const auto twice = to_host<float>(*memory, once->size());
      for (size_t i = 0; i < twice.size(); ++i) {
        ASSERT_EQ(twice[i], 2 * (*once)[i]) << what << ": a second call, at " << i;
      }
    }
    if (HasFailure()) return;
  }
}

TEST_F(GpuMoe, BackwardRequiresATrainingLayer) {
  LocalMoe layer({.tokens = 4, .hidden = 64, .ffn = 64, .experts = 3, .dtype = DType::bf16});
  EXPECT_THROW(layer.backward({}, {}, {}, {}, {}, {}, {}, {}, stream()), InvalidArgument);
}

}  // namespace
}  // namespace tandem::test
