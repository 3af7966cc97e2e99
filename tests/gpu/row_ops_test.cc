// Operations on rows of some families of models, and their gradients, on a GPU against the CPU.
#include "kernels/row_ops.h"

#include <algorithm>
#include <functional>
#include <string>

#include "tandem/error.h"
#include "tests/gpu/kernel_operands.h"

namespace tandem::test {
namespace {

class RowOperations : public OnGpus {};

/// Calls body(rows, columns, dtype, alignment) for all of them.
template <typename Body>
void for_each_matrix(const Body& body) {
  for_each_size([&](int64_t rows, int64_t columns) {
    if (columns == 0) return;
    for (const DType dtype : kDTypes) {
      for (const Alignment alignment : kAlignments) body(rows, columns, dtype, alignment);
    }
  });
}

TEST_P(RowOperations, MatchTheCpu) {
  run([](Communicator& comm) {
    for_each_matrix([&](int64_t rows, int64_t columns, DType dtype, Alignment alignment) {
      expect_equal(comm, "add_bias",
                   {vector("bias", DType::f32, columns),
                    close(matrix("rows", dtype, rows, columns, alignment))},
                   [](const Exec& exec, const TensorList& t) { add_bias(exec, t[0], t[1]); });
      expect_equal(comm, "gate_rows",
                   {matrix("gate", dtype, rows, 1, alignment),
                    close(matrix("rows", dtype, rows, columns, alignment))},
                   [](const Exec& exec, const TensorList& t) { gate_rows(exec, t[0], t[1]); });
    });
  });
}

TEST_P(RowOperations, ColumnSumsMatchTheCpu) {
  run([](Communicator& comm) {
    const auto check = [&](int64_t rows, int64_t columns, DType dtype, Alignment alignment) {
      for (const bool accumulate : {false, true}) {
        expect_equal(comm, accumulate ? "column_sums, added" : "column_sums",
                     {matrix("rows", dtype, rows, columns, alignment),
                      close(vector("sums", DType::f32, columns), 1 + 0.05 * double(rows))},
                     [&](const Exec& exec, const TensorList& t) {
                       column_sums(exec, t[0], t[1], accumulate);
                     });
      }
    };
    for_each_matrix(check);
    check(8200, 1152, DType::bf16, {.gap = 64});  // of q, k and v next to other columns
  });
}

TEST_P(RowOperations, GradientOfTheGateMatchesTheCpu) {
  run([](Communicator& comm) {
    for_each_matrix([&](int64_t rows, int64_t columns, DType dtype, Alignment alignment) {
      const double terms = double(columns) / 3;  // magnitude of a sum's
      expect_equal(comm, "gate_rows_backward",
                   {ranged(matrix("gate", dtype, rows, 1, alignment), -6, 6),
                    matrix("gated", dtype, rows, columns, alignment),
                    close(matrix("drows", dtype, rows, columns, alignment)),
                    close(matrix("dgate", dtype, rows, 1, {.gap = 7}), terms)},
                   [](const Exec& exec, const TensorList& t) {
                     gate_rows_backward(exec, t[0], t[1], t[2], t[3]);
                   });
    });
  });
}

/// `heads` of `head_dim` elements in each row.
void expect_head_norms(Communicator& comm, int64_t rows, int64_t heads, int64_t head_dim,
                       DType dtype, Alignment alignment) {
  const int64_t columns = heads * head_dim;
  const Operand weight = vector("weight", DType::f32, head_dim, 0.5, 1.5),
                matrix_of_heads = matrix("rows", dtype, rows, columns, alignment);
  expect_equal(
      comm, "rms_norm_heads", {weight, close(matrix_of_heads, 4)},
      [](const Exec& exec, const TensorList& t) { rms_norm_heads(exec, t[0], 1e-6, t[1]); });
  expect_equal(
      comm, "rms_norm_heads, saved",
      {weight, close(matrix_of_heads, 4), exact(matrix("saved", dtype, rows, columns))},
      [](const Exec& exec, const TensorList& t) { rms_norm_heads(exec, t[0], 1e-6, t[1], t[2]); });
  expect_equal(
      comm, "rms_norm_heads_backward",
      {matrix("unnormalized", dtype, rows, columns), weight,
       close(matrix("drows", dtype, rows, columns, alignment), 8),
       close(vector("dweight", DType::f32, head_dim), 4 + 0.1 * double(rows) * double(heads)),
       scratch(matrix("partial_sums", DType::f32, kHeadPartialSums, head_dim))},
      [](const Exec& exec, const TensorList& t) {
        rms_norm_heads_backward(exec, t[0], t[1], 1e-6, t[2], t[3], t[4]);
      });
}

TEST_P(RowOperations, NormsOfHeadsMatchTheCpu) {
  run([](Communicator& comm) {
    for (const DType dtype : kDTypes) {
      for (const Alignment alignment : kAlignments) {
        for (const int64_t head_dim : {7, 16, 64, 80, 128, 129, 256, 512}) {
          for (const int64_t rows : {0, 1, 37}) {
            expect_head_norms(comm, rows, 3, head_dim, dtype, alignment);
          }
        }
      }
      expect_head_norms(comm, 1000, 5, 128, dtype, {.gap = 8});  // several heads a warp
      expect_head_norms(comm, 9000, 1, 64, dtype, {});
    }
  });
}

TEST_P(RowOperations, OtherOperandsAreRefusedByName) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const Memory memory(4096, exec.device);
    const Tensor rows = memory.view(DType::f32, {2, 8}), halves = memory.view(DType::f16, {2, 8}),
                 vector = memory.view(DType::f32, {8}), gate = memory.view(DType::f32, {2, 1}),
                 long_head = memory.view(DType::f32, {520}),
                 row_of_one = memory.view(DType::f32, {1, 520});
    const auto expect_refusal = [](const std::string& start, const std::function<void()>& call) {
      try {
        call();
        ADD_FAILURE() << start << ": no error";
      } catch (const Error& error) {
        EXPECT_TRUE(std::string(error.what()).starts_with(start)) << error.what();
      }
    };
    expect_refusal("column_sums: rows f16[2, 8]", [&] { column_sums(exec, halves, vector, true); });
    expect_refusal("column_sums: sums f32[2, 8]", [&] { column_sums(exec, rows, rows, true); });
    expect_refusal("gate_rows_backward: dgate f32[2, 8]",
                   [&] { gate_rows_backward(exec, gate, rows, rows, rows); });
    expect_refusal("rms_norm_heads: head_dim 520: expected at most 512",
                   [&] { rms_norm_heads(exec, long_head, 1e-6, row_of_one); });
    expect_refusal("rms_norm_heads_backward: partial_sums f32[2, 8]",
                   [&] { rms_norm_heads_backward(exec, rows, vector, 1e-6, rows, vector, rows); });
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, RowOperations, testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test
