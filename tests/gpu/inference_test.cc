// Kernels of inference on a GPU against those on the CPU: attention over pages, sampling,
// operations on rows of some families, and GEMMs of few rows.
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "gemm/cuda/rows_gemm.h"
#include "gemm/gemm.h"
#include "kernels/paged_attention.h"
#include "kernels/row_ops.h"
#include "kernels/sample.h"
#include "kernels/swiglu.h"
#include "tandem/random.h"
#include "tests/gpu/kernel_operands.h"

namespace tandem::test {
namespace {

class Inference : public OnGpus {};

/// Random choices of a case.
struct Draw {
  uint64_t trial, count = 0;
  int64_t up_to(int64_t bound) { return int64_t(philox(7, trial, count++)[0] % uint64_t(bound)); }
  double unit() { return double(uniform(8, trial, count++)); }
};

/// Memory of the CPU or the GPU with its view.
struct Values {
  Values(const Exec& exec, DType dtype, std::initializer_list<int64_t> shape)
      : memory(elements(shape) * size_of(dtype), exec.device), view(memory.view(dtype, shape)) {}
  static size_t elements(std::initializer_list<int64_t> shape) {
    size_t all = 1;
    for (const int64_t size : shape) all *= size_t(size);
    return all;
  }
  Memory memory;
  Tensor view;
};

Values on_gpu_like(const Exec& exec, const Values& host, std::initializer_list<int64_t> shape) {
  Values result(exec, host.view.dtype(), shape);
  copy(exec, all_bytes(host.memory), all_bytes(result.memory));
  return result;
}
Memory to_host(const Exec& exec, const Memory& memory) {
  Memory result(memory.bytes());
  copy(exec, all_bytes(memory), all_bytes(result));
  return result;
}

Values random_values(DType dtype, int64_t rows, int64_t columns, uint64_t seed) {
  Values result(Exec{}, dtype, {rows, columns});
  const Memory random = random_buffer(dtype, rows * columns, seed);
  copy(Exec{}, all_bytes(random), all_bytes(result.memory));
  return result;
}

/// Sequences with cached keys and values, and the new rows of each.
struct PagedCase {
  PagedShape shape;
  int64_t window, sequences;
  std::vector<int32_t> lengths, news;  ///< tokens with the new ones, new ones
  std::vector<int32_t> pages;
  DType dtype;

  int64_t line() const { return (shape.max_tokens - 1) / kPageTokens + 1; }
  int64_t width() const { return (shape.heads + 2 * shape.kv_heads) * shape.head_dim; }
};

PagedCase draw_case(uint64_t trial, DType dtype) {
  Draw draw{trial};
  const int64_t dims[] = {16, 32, 64, 80, 96, 112, 128}, groups[] = {1, 2, 3, 4, 7, 8, 12};
  PagedCase c;
  c.dtype = dtype;
  c.sequences = 1 + draw.up_to(4);
  c.shape.head_dim = dims[draw.up_to(7)];
  c.shape.kv_heads = 1 + draw.up_to(3);
  c.shape.heads = c.shape.kv_heads * groups[draw.up_to(7)];
  c.shape.max_tokens = 1 + draw.up_to(400);
  c.window = draw.up_to(3) == 0 ? 1 + draw.up_to(c.shape.max_tokens) : 0;
  for (int64_t s = 0; s < c.sequences; ++s) {
    c.lengths.push_back(int32_t(1 + draw.up_to(c.shape.max_tokens)));
    c.news.push_back(draw.up_to(2) == 0 ? 1 : int32_t(1 + draw.up_to(c.lengths.back())));
  }
  c.shape.rows = std::accumulate(c.news.begin(), c.news.end(), int64_t(0)) + 1;
  c.pages.resize(size_t(c.sequences * c.line()));
  std::iota(c.pages.begin(), c.pages.end(), 0);
  for (size_t i = c.pages.size() - 1; i > 0; --i) {
    std::swap(c.pages[i], c.pages[size_t(draw.up_to(int64_t(i) + 1))]);
  }
  return c;
}

/// Division of the new rows of a case into runs.
struct PagedRuns {
  int64_t max_rows;  ///< of a sequence in a run
  bool together;     ///< the sequences' rows of a run
  bool as_chunks;
};

/// Outputs of the new rows, [rows, heads * head_dim], in the order of the sequences.
std::vector<std::byte> run_paged(const Exec& exec, const PagedCase& c, const PagedRuns& runs) {
  const int64_t pages = int64_t(c.pages.size()), out_width = c.shape.heads * c.shape.head_dim;
  const int64_t kv_width = c.shape.kv_heads * c.shape.head_dim;
  const RopeTable rope(exec, c.shape.max_tokens, c.shape.head_dim, 10000.0);
  const Values host_keys = random_values(c.dtype, pages * kPageTokens, kv_width, 1);
  const Values host_values = random_values(c.dtype, pages * kPageTokens, kv_width, 2);
  const auto dims = {pages, kPageTokens, c.shape.kv_heads, c.shape.head_dim};
  const Values keys = on_gpu_like(exec, host_keys, dims),
               values = on_gpu_like(exec, host_values, dims);
  const Values new_rows = random_values(c.dtype, c.shape.rows, c.width(), 3);
  PagedShape shape = c.shape;
  if (runs.as_chunks && c.dtype == DType::bf16) shape.singles = 1;  // f32 rows are all single
  PagedAttention attention(exec, shape, rope, c.window);
  const size_t row_bytes = size_t(out_width) * size_of(c.dtype);
  std::vector<std::byte> outputs;
  std::vector<int32_t> done(c.lengths.size(), 0);
  std::vector<std::vector<std::byte>> of_sequence(c.lengths.size());
  const auto run = [&](const std::vector<size_t>& which) {
    std::vector<int32_t> sequences, positions;
    std::vector<PagedChunk> chunks;
    std::vector<int64_t> sources;
    for (const size_t s : which) {
      const int64_t count = std::min<int64_t>(runs.max_rows, c.news[s] - done[s]);
      chunks.push_back({int64_t(sequences.size()), count});
      int64_t first_row = done[s];
      for (size_t before = 0; before < s; ++before) first_row += c.news[before];
      for (int64_t i = 0; i < count; ++i) {
        sequences.push_back(int32_t(s));
        positions.push_back(int32_t(c.lengths[s] - c.news[s] + done[s] + i));
        sources.push_back(first_row + i);
      }
      done[s] += int32_t(count);
    }
    const auto rows = int64_t(sequences.size());
    Values host_qkv(Exec{}, c.dtype, {rows, c.width()});
    const size_t bytes = size_t(c.width()) * size_of(c.dtype);
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(host_qkv.memory.data() + size_t(i) * bytes,
                  new_rows.memory.data() + size_t(sources[size_t(i)]) * bytes, bytes);
    }
    const Values qkv = on_gpu_like(exec, host_qkv, {rows, c.width()});
    const Values out(exec, c.dtype, {rows, out_width});
    const auto upload = [&](const std::vector<int32_t>& numbers,
                            std::initializer_list<int64_t> to) {
      Values result(exec, DType::i32, to);
      copy(exec, Tensor::of(std::span(numbers), {int64_t(numbers.size())}),
           result.memory.view(DType::i32, {int64_t(numbers.size())}));
      return result;
    };
    const Values on_s = upload(sequences, {rows}), on_p = upload(positions, {rows});
    const Values on_pages = upload(c.pages, {c.sequences, c.line()});
    PagedRows paged{on_s.view, on_p.view, on_pages.view};
    if (runs.as_chunks) paged.chunks = chunks;
    attention.run(
        exec, paged, qkv.view.narrow(1, 0, out_width), qkv.view.narrow(1, out_width, kv_width),
        qkv.view.narrow(1, out_width + kv_width, kv_width), keys.view, values.view, out.view);
    const Memory found = to_host(exec, out.memory);
    int64_t row = 0;
    for (const PagedChunk& chunk : chunks) {
      auto& bytes_of = of_sequence[which[size_t(&chunk - chunks.data())]];
      bytes_of.insert(bytes_of.end(), found.data() + size_t(row) * row_bytes,
                      found.data() + size_t(row + chunk.rows) * row_bytes);
      row += chunk.rows;
    }
  };
  for (bool any = true; any;) {
    std::vector<size_t> left;
    for (size_t s = 0; s < c.lengths.size(); ++s) {
      if (done[s] < c.news[s]) left.push_back(s);
    }
    any = !left.empty();
    if (!any) break;
    if (runs.together) {
      run(left);
    } else {
      run({left[0]});
    }
  }
  for (const auto& each : of_sequence) outputs.insert(outputs.end(), each.begin(), each.end());
  return outputs;
}

double value_of(DType dtype, const std::vector<std::byte>& bytes, size_t i) {
  if (dtype == DType::f32) {
    float value;
    std::memcpy(&value, bytes.data() + i * 4, 4);
    return value;
  }
  BFloat16 value;
  std::memcpy(&value, bytes.data() + i * 2, 2);
  return double(value.to_float());
}

constexpr PagedRuns kAtOnce{1 << 20, true, false};

TEST_P(Inference, PagedAttentionMatchesTheCpu) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 0; trial < 40; ++trial) {
      for (const DType dtype : kDTypes) {
        const PagedCase c = draw_case(trial, dtype);
        const auto expected = run_paged(Exec{}, c, kAtOnce);
        // Random values in [-1, 1): so are results. bf16 rounds weights, keys and queries.
        const double bound = dtype == DType::f32 ? 4e-6 : 0.02;
        for (const bool as_chunks : {false, true}) {
          const auto found = run_paged(exec, c, {1 << 20, true, as_chunks});
          ASSERT_EQ(found.size(), expected.size());
          double worst = 0;
          for (size_t i = 0; i < found.size() / size_of(dtype); ++i) {
            const double error = value_of(dtype, found, i) - value_of(dtype, expected, i);
            worst = std::isnan(error) ? INFINITY : std::max(worst, std::abs(error));
          }
          EXPECT_LE(worst, bound) << "trial " << trial << " " << name_of(dtype) << " chunks "
                                  << as_chunks << " head_dim " << c.shape.head_dim << " heads "
                                  << c.shape.heads << "/" << c.shape.kv_heads << " window "
                                  << c.window;
        }
      }
    }
  });
}

TEST_P(Inference, BitsDependNeitherOnTheBatchNorOnTheChunks) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 100; trial < 115; ++trial) {
      for (const DType dtype : kDTypes) {
        const PagedCase c = draw_case(trial, dtype);
        for (const bool as_chunks : {false, true}) {
          const auto expected = run_paged(exec, c, {1 << 20, true, as_chunks});
          EXPECT_EQ(run_paged(exec, c, {1 << 20, false, as_chunks}), expected) << trial;
          EXPECT_EQ(run_paged(exec, c, {1 + int64_t(trial % 37), true, as_chunks}), expected)
              << trial;
        }
      }
    }
  });
}

TEST_P(Inference, SamplingChoosesTheCpusTokens) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 0; trial < 60; ++trial) {
      Draw draw{1000 + trial};
      const int64_t sizes[] = {1, 7, 300, 5000, 32000, 151936};
      const int64_t vocab = sizes[draw.up_to(6)], rows = 1 + draw.up_to(5);
      Values logits = random_values(DType::f32, rows, vocab, trial);
      auto* const values = reinterpret_cast<float*>(logits.memory.data());
      const double scale = trial % 3 == 0 ? 1 : trial % 3 == 1 ? 20 : 200;
      for (int64_t i = 0; i < rows * vocab; ++i) {
        values[i] *= float(scale);
        if (trial % 4 == 1) values[i] = std::round(values[i]);  // equal logits
      }
      if (trial % 10 == 9) values[(rows - 1) * vocab + vocab / 2] = NAN;
      Values options(Exec{}, DType::u8, {rows, int64_t(sizeof(SampleOptions))});
      auto* const of_rows = reinterpret_cast<SampleOptions*>(options.memory.data());
      for (int64_t row = 0; row < rows; ++row) {
        of_rows[row] = {.temperature = draw.up_to(4) == 0 ? 0 : 0.3 + 2 * draw.unit(),
                        .top_p = draw.up_to(2) == 0 ? 1 : 0.05 + 0.95 * draw.unit(),
                        .top_k = draw.up_to(2) == 0 ? 0 : 1 + draw.up_to(60),
                        .uniform = draw.unit()};
      }
      const Values on_logits = on_gpu_like(exec, logits, {rows, vocab});
      const Values on_options = on_gpu_like(exec, options, {rows, int64_t(sizeof(SampleOptions))});
      const Values scratch(exec, DType::u8, {rows, sample_scratch(exec, vocab)});
      const Values sampled(exec, DType::u8, {rows, int64_t(sizeof(Sampled))});
      sample_rows(exec, on_logits.view, on_options.view, scratch.view, sampled.view);
      const Memory found = to_host(exec, sampled.memory);
      for (int64_t row = 0; row < rows; ++row) {
        Sampled result;
        std::memcpy(&result, found.data() + size_t(row) * sizeof(Sampled), sizeof(Sampled));
        const Sampled expected = sample_row({values + row * vocab, size_t(vocab)}, of_rows[row]);
        EXPECT_EQ(result.token, expected.token) << "trial " << trial << " row " << row;
        EXPECT_NEAR(result.log_prob, expected.log_prob, 1e-3) << "trial " << trial;
      }
    }
  });
}

TEST_P(Inference, RowOperationsMatchTheCpu) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      if (columns == 0) return;
      for (const DType dtype : kDTypes) {
        for (const Alignment alignment : kAlignments) {
          expect_equal(comm, "add_bias",
                       {vector("bias", DType::f32, columns),
                        close(matrix("rows", dtype, rows, columns, alignment))},
                       [](const Exec& exec, const Tensors& t) { add_bias(exec, t[0], t[1]); });
          expect_equal(comm, "gate_rows",
                       {matrix("gate", dtype, rows, 1, alignment),
                        close(matrix("rows", dtype, rows, columns, alignment))},
                       [](const Exec& exec, const Tensors& t) { gate_rows(exec, t[0], t[1]); });
          if (columns > 512) continue;
          expect_equal(
              comm, "rms_norm_heads",
              {vector("weight", DType::f32, columns),
               close(matrix("rows", dtype, rows, 3 * columns, alignment), 4)},
              [](const Exec& exec, const Tensors& t) { rms_norm_heads(exec, t[0], 1e-6, t[1]); });
        }
      }
    });
  });
}

TEST_P(Inference, GemmsOfFewRowsMatchTheCpuAndDoNotDependOnEachOther) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 0; trial < 30; ++trial) {
      Draw draw{2000 + trial};
      const int64_t m = 1 + draw.up_to(gpu::kMaxGemmRows), n = 1 + draw.up_to(700);
      const int64_t k = 64 * (1 + draw.up_to(trial % 5 == 0 ? 80 : 9));
      const Values a = random_values(DType::bf16, m, k, trial);
      const Values weight = random_values(DType::bf16, n, k, trial + 1);
      const Values expected(Exec{}, DType::f32, {m, n});
      gemm(a.view, weight.view.transposed(), expected.view);
      const Values on_a = on_gpu_like(exec, a, {m, k}),
                   on_weight = on_gpu_like(exec, weight, {n, k});
      const Values out(exec, DType::f32, {m, n}), one(exec, DType::f32, {1, n});
      ASSERT_TRUE(gpu::is_rows_gemm(on_a.view, on_weight.view, out.view));
      gpu::rows_gemm(exec.stream, on_a.view, on_weight.view, out.view);
      const Memory found = to_host(exec, out.memory);
      const auto* const values = reinterpret_cast<const float*>(found.data());
      for (int64_t i = 0; i < m * n; ++i) {
        ASSERT_NEAR(values[i], expected.view.as<float>()[i], 1e-6 * double(k)) << trial << " " << i;
      }
      const Values twice = on_gpu_like(exec, out, {m, n});
      gpu::rows_gemm(exec.stream, on_a.view, on_weight.view, twice.view, {.accumulate = true});
      const Memory doubled = to_host(exec, twice.memory);
      for (int64_t i = 0; i < m * n; ++i) {
        ASSERT_EQ(reinterpret_cast<const float*>(doubled.data())[i], 2 * values[i]) << trial;
      }
      if (n % 2 == 0) {
        const Values hidden(exec, DType::bf16, {m, n}), inner(exec, DType::bf16, {m, n / 2}),
            fused(exec, DType::bf16, {m, n / 2});
        gpu::rows_gemm(exec.stream, on_a.view, on_weight.view, hidden.view);
        swiglu_forward(exec, hidden.view.narrow(1, 0, n / 2), hidden.view.narrow(1, n / 2, n / 2),
                       inner.view);
        ASSERT_TRUE(gemm_swiglu(exec, on_a.view, on_weight.view, fused.view));
        const Memory expected_bits = to_host(exec, inner.memory);
        const Memory fused_bits = to_host(exec, fused.memory);
        EXPECT_EQ(std::memcmp(expected_bits.data(), fused_bits.data(), fused_bits.bytes()), 0)
            << trial;
      }
      const int64_t row = draw.up_to(m);
      gpu::rows_gemm(exec.stream, on_a.view.rows(row, 1), on_weight.view, one.view);
      const Memory single = to_host(exec, one.memory);
      EXPECT_EQ(std::memcmp(single.data(), values + row * n, single.bytes()), 0)
          << "row " << row << " of " << m << " has other bits by itself";
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, Inference, testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test
