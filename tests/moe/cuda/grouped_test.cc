// MoE layer on one GPU: grouped GEMMs are exact for numbers that allow it, and the layer matches
// the slow reference (f64).
#include <fmt/format.h>

#include <cmath>
#include <iterator>
#include <string>

#include "core/cuda/graph.h"
#include "overlap/moe/cuda/one_gpu.h"
#include "overlap/moe/load.h"
#include "tandem/error.h"
#include "tests/moe/cuda/values.h"

namespace tandem::test {
namespace {

using namespace gpu;

struct Product {
  DType dtype;
  std::vector<int64_t> counts;  ///< rows of each group
  int64_t columns, k;
  bool gathered, transposed, paired;
  std::string name() const {
    return fmt::format("{} {} groups {} x {} {}{}{}", name_of(dtype), counts.size(), columns, k,
                       gathered ? "gathered" : "sorted", transposed ? ", weight transposed" : "",
                       paired ? ", in pairs" : "");
  }
  /// Index into the weight: groups x [columns, k], or groups x [k, columns] if transposed.
  size_t weight_at(int64_t group, int64_t column, int64_t at_k) const {
    return size_t(transposed ? (group * k + at_k) * columns + column
                             : (group * columns + column) * k + at_k);
  }
};

TEST_F(GpuMoe, GroupedGemmsOfWholeNumbersAreExact) {
  std::vector<Product> products;
  const std::vector<std::vector<int64_t>> spreads{
      {1}, {128}, {129}, {0, 0, 7}, {300, 0, 1, 128, 5}, std::vector<int64_t>(40, 33), {2500, 3}};
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const auto& counts : spreads) {
      for (const auto& [columns, k] :
           {std::pair{8, 8}, {256, 64}, {264, 72}, {1000, 200}, {136, 520}}) {
        products.push_back({dtype, counts, columns, k, true, false, false});
        for (const bool paired : {false, true}) {
          for (const bool transposed : {false, true}) {
            products.push_back({dtype, counts, columns, k, false, transposed, paired});
          }
        }
      }
    }
  }
  for (const Product& p : products) {
    const int groups = int(p.counts.size());
    int64_t rows = 0;
    for (const int64_t count : p.counts) rows += count;
    const GroupedShape shape{.dtype = p.dtype,
                             .groups = groups,
                             .rows = rows,
                             .columns = p.columns,
                             .k = p.k,
                             .gathered = p.gathered,
                             .transposed = p.transposed,
                             .paired = p.paired};
    const auto gemm = make_grouped_gemm(shape);
    const PermutedRows permuted = permute(p.counts, shape, *gemm);
    // Sums of at most 520 terms below 0.49 stay whole numbers up to 256, exact in bf16.
    const auto x = whole_numbers(rows * p.k, 1, 1),
               w = whole_numbers(groups * p.columns * p.k, 2, 1);
    std::vector<float> saved_x = x;
    for (size_t i = 0; i < saved_x.size(); ++i) {
      if (philox(8, 1, i)[0] % 2) saved_x[i] = 0;
    }
    const size_t padded = size_t(shape.padded_rows());
    const DeviceMemory weight = to_device(stored(p.dtype, w)), out(padded * size_t(p.columns) * 2);
    std::vector<float> laid = saved_x;
    if (!p.gathered) {
      laid.assign(padded * size_t(p.k), 3);  // padding rows of a tile must not matter
      for (size_t r = 0; r < permuted.rows(); ++r) {
        std::copy_n(&saved_x[r * size_t(p.k)], p.k, &laid[size_t(permuted.at[r]) * size_t(p.k)]);
      }
    }
    const DeviceMemory on_x = to_device(stored(p.dtype, laid));
    gemm->launch({on_x.data(), permuted.source_data(), weight.data(), out.data()}, stream());
    const auto found = loaded(p.dtype, to_host<uint16_t>(out, padded * size_t(p.columns)));
    for (size_t r = 0; r < permuted.rows(); ++r) {
      const float* row = &saved_x[r * size_t(p.k)];
      for (int64_t n = 0; n < p.columns; ++n) {
        float sum = 0;
        for (int64_t k = 0; k < p.k; ++k) sum += row[k] * w[p.weight_at(permuted.group[r], n, k)];
        ASSERT_LE(std::abs(sum), 256) << p.name();
        ASSERT_EQ(found[size_t(permuted.at[r]) * size_t(p.columns) + size_t(n)], sum)
            << p.name() << ": row " << r << " column " << n;
      }
    }
  }
}

TEST_F(GpuMoe, UnsupportedShapesAreRejectedByName) {
  const auto refused = [](GroupedShape shape) {
    try {
      make_grouped_gemm(shape);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refused({.groups = 0, .rows = 1, .columns = 8, .k = 8}).find("groups = 0"),
            std::string::npos);
  EXPECT_NE(refused({.groups = 2, .rows = 1, .columns = 12, .k = 8}).find("columns = 12"),
            std::string::npos);
  EXPECT_NE(refused({.groups = 2, .rows = 1, .columns = 8, .k = 4}).find("k = 4"),
            std::string::npos);
  EXPECT_NE(refused({.rows = 1, .columns = 8, .k = 8, .gathered = true, .paired = true})
                .find("paired = 1: expected sorted rows"),
            std::string::npos);
  EXPECT_NE(refused({.rows = 1, .columns = 8, .k = 8, .gated = true, .transposed = true})
                .find("transposed"),
            std::string::npos);
  EXPECT_NE(refused({.dtype = DType::f32, .rows = 1, .columns = 8, .k = 8}).find("f32"),
            std::string::npos);
  EXPECT_THROW(
      LocalMoe(
          {.tokens = 1, .hidden = 8, .ffn = 8, .experts = 2, .top_k = 3, .dtype = DType::bf16}),
      InvalidArgument);
}

TEST_F(GpuMoe, OverlappedSortIsRejectedIfUnsupported) {
  const auto refused = [](const auto& make) {
    try {
      make();
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const MoeShape s{
      .tokens = 4, .hidden = 64, .ffn = 64, .experts = 2, .top_k = 1, .dtype = DType::bf16};
  const auto of_layer = [&](const LocalMoeForm& form) {
    return refused([&] { LocalMoe(s, form); });
  };
  EXPECT_NE(of_layer({.sorting_blocks = 4}).find("expected sorted rows"), std::string::npos);
  EXPECT_NE(of_layer({.sorts_first = true, .e4m3 = true, .sorting_blocks = 4}).find("not of e4m3"),
            std::string::npos);
  EXPECT_NE(of_layer({.sorts_first = true, .sorting_blocks = -1}).find("-1 blocks that sort"),
            std::string::npos);
  EXPECT_NE(of_layer({.sorts_first = true, .sorting_blocks = 1 << 20}).find("1048576 blocks"),
            std::string::npos);
  const auto gathering = make_grouped_gemm({.rows = 1, .columns = 8, .k = 8, .gathered = true});
  const uint32_t ready = 0;
  EXPECT_NE(refused([&] { gathering->launch({.ready = &ready}, stream()); }).find("sorted rows"),
            std::string::npos);
  EXPECT_NE(refused([&] { gathering->launch({.concurrent = true}, stream()); }).find("sorted rows"),
            std::string::npos);
}

/// A layer with its operands on the host.
struct Layer {
  explicit Layer(const MoeShape& of, const LocalMoeForm& form = {}) : shape(of), layer(of, form) {
    const int64_t in = shape.experts * 2 * shape.ffn;
    in_bits = stored(shape.dtype, random_values(in * shape.hidden, 11, 0.1f));
    out_bits =
        stored(shape.dtype, random_values(shape.experts * shape.hidden * shape.ffn, 12, 0.1f));
    x_bits = stored(shape.dtype, random_values(shape.tokens * shape.hidden, 13, 1));
    weights = random_values(shape.tokens * shape.top_k, 14, 1);
  }
  std::vector<double> expected(const std::vector<int32_t>& chosen, int64_t rows) const {
    return reference_of(shape, chosen, rows, weights, loaded(shape.dtype, x_bits),
                        loaded(shape.dtype, in_bits), loaded(shape.dtype, out_bits));
  }

  MoeShape shape;
  LocalMoe layer;
  std::vector<uint16_t> in_bits, out_bits, x_bits;
  std::vector<float> weights;
};

constexpr LocalMoeForm kForms[] = {{},
                                   {.pairs = true},
                                   {.sorts_first = true},
                                   {.sorts_first = true, .pairs = true},
                                   {.sorts_first = true, .sorting_blocks = 1},
                                   {.sorts_first = true, .pairs = true, .sorting_blocks = 5},
                                   {.sorts_first = true, .pairs = true, .sorting_blocks = 12}};

TEST_F(GpuMoe, LayerMatchesReference) {
  size_t number = 0;
  const auto slow = [](const LayerCase& c) {
    return c.shape.experts * c.shape.hidden * c.shape.ffn > 64 * 200 * 136;
  };
  for (const LayerCase& c : layer_cases({{1, 1}, {4, 2}, {8, 2}, {64, 4}, {64, 8}},
                                        {{64, 64}, {200, 136}, {512, 328}}, slow)) {
    const MoeShape& s = c.shape;
    // Forms alternate over the cases.
    const LocalMoeForm& form = kForms[number++ % std::size(kForms)];
    const std::string what =
        fmt::format("{}{}{}, {} blocks sort", describe(c), form.sorts_first ? ", sorted first" : "",
                    form.pairs ? ", in pairs" : "", form.sorting_blocks);
    Layer all(s, form);
    const auto chosen = chosen_experts({s.experts, 1, 1}, s.top_k, {c.imbalance, 5}, 0, c.rows);
    const DeviceMemory x = to_device(all.x_bits), w_in = to_device(all.in_bits),
                       w_out = to_device(all.out_bits), weights = to_device(all.weights),
                       experts = to_device(chosen), out(size_t(s.tokens * s.hidden) * 4);
    const auto run = [&](DType dtype) {
      const Tensor result = out.view(dtype, {c.rows, s.hidden});
      check(cudaMemsetAsync(out.data(), 0xff, out.bytes(), stream()), "poison");
      all.layer.forward(x.view(s.dtype, {c.rows, s.hidden}),
                        {experts.view(DType::i32, {c.rows, s.top_k}),
                         weights.view(DType::f32, {c.rows, s.top_k})},
                        w_in.view(s.dtype, {s.experts * 2 * s.ffn, s.hidden}),
                        w_out.view(s.dtype, {s.experts * s.hidden, s.ffn}), result, stream());
    };
    const size_t count = size_t(c.rows * s.hidden);
    run(s.dtype);
    const auto once = to_host<uint16_t>(out, count);
    run(s.dtype);
    ASSERT_EQ(to_host<uint16_t>(out, count), once) << what << ": another run";
    const auto expected = all.expected(chosen, c.rows);
    expect_near(expected, loaded(s.dtype, once), s.dtype, what);
    run(DType::f32);
    expect_near(expected, to_host<float>(out, count), s.dtype, what + ", f32 out");
    EXPECT_EQ(all.layer.dropped(stream()), 0);
  }
}

TEST_F(GpuMoe, OneGraphServesManyRoutings) {
  const MoeShape s{
      .tokens = 200, .hidden = 128, .ffn = 72, .experts = 16, .top_k = 2, .dtype = DType::bf16};
  for (const LocalMoeForm& form : {kForms[0], kForms[4], kForms[6]}) {
    Layer all(s, form);
    const DeviceMemory x = to_device(all.x_bits), w_in = to_device(all.in_bits),
                       w_out = to_device(all.out_bits), weights = to_device(all.weights),
                       experts(size_t(s.tokens * s.top_k) * 4),
                       out(size_t(s.tokens * s.hidden) * 2);
    const auto run = [&] {
      all.layer.forward(x.view(s.dtype, {s.tokens, s.hidden}),
                        {experts.view(DType::i32, {s.tokens, s.top_k}),
                         weights.view(DType::f32, {s.tokens, s.top_k})},
                        w_in.view(s.dtype, {s.experts * 2 * s.ffn, s.hidden}),
                        w_out.view(s.dtype, {s.experts * s.hidden, s.ffn}),
                        out.view(s.dtype, {s.tokens, s.hidden}), stream());
    };
    run();
    check(cudaStreamSynchronize(stream()), "a first call");
    const Graph graph(stream(), run);
    for (uint64_t routing = 0; routing < 40; ++routing) {
      const auto chosen = chosen_experts({s.experts, 1, 1}, s.top_k,
                                         {routing % 3 == 0 ? 0.0 : 1.0, routing}, 0, s.tokens);
      check(cudaMemcpyAsync(experts.data(), chosen.data(), chosen.size() * 4,
                            cudaMemcpyHostToDevice, stream()),
            "write");
      check(cudaStreamSynchronize(stream()), "write");
      check(cudaMemsetAsync(out.data(), 0xff, out.bytes(), stream()), "poison");
      graph.launch(stream());
      const auto found = loaded(s.dtype, to_host<uint16_t>(out, size_t(s.tokens * s.hidden)));
      expect_near(all.expected(chosen, s.tokens), found, s.dtype,
                  fmt::format("routing {}", routing));
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace tandem::test
