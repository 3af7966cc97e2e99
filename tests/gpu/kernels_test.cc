// Transformer kernels on a GPU against those on the CPU: odd sizes, strided rows and unaligned
// starts. Every call runs twice, with equal bits, and leaves the memory around its outputs as it
// was.
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cross_entropy.h"
#include "kernels/dct.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "kernels/swiglu.h"
#include "tests/gpu/kernel_operands.h"

namespace tandem::test {
namespace {

class Kernels : public OnGpus {};

constexpr int64_t kBegin = 5;  // first row or column of this rank's shard of the vocabulary
constexpr int64_t kTableRows = 11;
constexpr float kScale = 0.5f;  // of a loss

TEST_P(Kernels, RmsNormMatchesTheCpu) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      if (columns == 0) return;  // the mean of nothing
      for (const DType dtype : kDTypes) {
        for (const Alignment alignment : kAlignments) {
          expect_equal(comm, "rms_norm_forward",
                       {matrix("x", DType::f32, rows, columns, alignment),
                        vector("weight", DType::f32, columns),
                        close(matrix("out", dtype, rows, columns, alignment)),
                        close(vector("inverse_rms", DType::f32, rows))},
                       [](const Exec& exec, const TensorList& t) {
                         rms_norm_forward(exec, t[0], t[1], 1e-5, t[2], t[3]);
                       });
          expect_equal(
              comm, "rms_norm",
              {matrix("x", dtype, rows, columns, alignment), vector("weight", dtype, columns),
               close(matrix("out", dtype, rows, columns, alignment))},
              [](const Exec& exec, const TensorList& t) {
                rms_norm(exec, t[0], t[1], 1e-5, t[2]);
              });
        }
      }
    });
  });
}

TEST_P(Kernels, AddAndRmsNormHaveTheBitsOfTheirTwoSteps) {
  run([](Communicator& comm) {
    const Exec on_gpu{device_of(comm), stream_of(comm)};
    for_each_size([&](int64_t rows, int64_t columns) {
      if (columns == 0) return;  // the mean of nothing
      for (const DType dtype : kDTypes) {
        for (const Alignment alignment : kAlignments) {
          std::vector<Operand> operands{matrix("x", DType::f32, rows, columns, alignment),
                                        matrix("branch", dtype, rows, columns, alignment),
                                        vector("weight", DType::f32, columns),
                                        exact(matrix("y", DType::f32, rows, columns, alignment)),
                                        close(matrix("out", dtype, rows, columns, alignment)),
                                        close(vector("inverse_rms", DType::f32, rows))};
          std::vector<Memory> in_steps, at_once;
          for (size_t i = 0; i < operands.size(); ++i) {
            const Memory initial = initial_memory(operands[i], i);
            for (auto* const memory : {&in_steps, &at_once}) {
              memory->emplace_back(initial.bytes(), on_gpu.device);
              copy(on_gpu, all_bytes(initial), all_bytes(memory->back()));
            }
          }
          const auto tensor = [&](const std::vector<Memory>& memory, size_t i) {
            return operands[i].view(memory[i]);
          };
          const auto fused = [](const Exec& exec, const TensorList& t) {
            add_rms_norm_forward(exec, t[0], t[1], t[2], 1e-5, t[3], t[4], t[5]);
          };
          expect_equal(comm, "add_rms_norm_forward", operands, fused);
          TensorList all;
          for (size_t i = 0; i < operands.size(); ++i) all.push_back(tensor(at_once, i));
          fused(on_gpu, all);
          add(on_gpu, tensor(in_steps, 0), tensor(in_steps, 1), tensor(in_steps, 3));
          rms_norm_forward(on_gpu, tensor(in_steps, 3), tensor(in_steps, 2), 1e-5,
                           tensor(in_steps, 4), tensor(in_steps, 5));
          for (size_t i = 3; i < operands.size(); ++i) {
            Memory found(at_once[i].bytes()), expected(in_steps[i].bytes());
            copy(on_gpu, all_bytes(at_once[i]), all_bytes(found));
            copy(on_gpu, all_bytes(in_steps[i]), all_bytes(expected));
            EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.bytes()), 0)
                << operands[i].name << ": " << rows << " x " << columns;
          }
          expect_equal(comm, "add_rms_norm_forward in alignment",
                       {exact(operands[0]), operands[1], operands[2], operands[4], operands[5]},
                       [](const Exec& exec, const TensorList& t) {
                         add_rms_norm_forward(exec, t[0], t[1], t[2], 1e-5, t[0], t[3], t[4]);
                       });
        }
      }
    });
  });
}

TEST_P(Kernels, RmsNormBackwardMatchesTheCpu) {
  run([](Communicator& comm) {
    const Exec on_gpu{device_of(comm), stream_of(comm)};
    const auto check = [&](int64_t rows, int64_t columns) {
      for (const DType dtype : kDTypes) {
        for (const Alignment alignment : kAlignments) {
          expect_equal(
              comm, "rms_norm_backward",
              {matrix("x", DType::f32, rows, columns, alignment),
               vector("weight", DType::f32, columns),
               vector("inverse_rms", DType::f32, rows, 0.5, 1.5),
               matrix("dout", dtype, rows, columns, alignment),
               close(matrix("dx", DType::f32, rows, columns, alignment), 1),
               close(vector("dweight", DType::f32, columns), 1 + 0.05 * double(rows)),
               scratch(matrix("partial_sums", DType::f32,
                              rms_norm_partial_sums(on_gpu, rows, columns), columns, alignment)),
               close(matrix("dx_bf16", DType::bf16, rows, columns, alignment), 1)},
              [](const Exec& exec, const TensorList& t) {
                rms_norm_backward(exec, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7]);
              });
          expect_equal(
              comm, "rms_norm_backward to bf16",
              {matrix("x", DType::f32, rows, columns, alignment),
               vector("weight", DType::f32, columns),
               vector("inverse_rms", DType::f32, rows, 0.5, 1.5),
               matrix("dout", dtype, rows, columns, alignment),
               close(matrix("dx", DType::bf16, rows, columns, alignment), 1),
               close(vector("dweight", DType::f32, columns), 1 + 0.05 * double(rows)),
               scratch(matrix("partial_sums", DType::f32,
                              rms_norm_partial_sums(on_gpu, rows, columns), columns, alignment))},
              [](const Exec& exec, const TensorList& t) {
                rms_norm_backward(exec, t[0], t[1], t[2], t[3], t[4], t[5], t[6]);
              });
        }
      }
    };
    for_each_size(check);
    check(1000, 1024);  // several rows a block, and more blocks than fit
    check(900, 4096);
    check(300, 8192);  // as many as a block's registers hold
    check(280, 8200);
  });
}

void expect_swiglu(Communicator& comm, DType dtype, int64_t rows, int64_t columns,
                   Alignment alignment) {
  constexpr double kMagnitude = 0.1;
  const Operand gate = ranged(matrix("gate", dtype, rows, columns, alignment), -6, 6);
  const Operand up = matrix("up", dtype, rows, columns, alignment);
  expect_equal(
      comm, "swiglu_forward",
      {gate, up, close(matrix("out", dtype, rows, columns, alignment), kMagnitude)},
      [](const Exec& exec, const TensorList& t) { swiglu_forward(exec, t[0], t[1], t[2]); });
  expect_equal(comm, "swiglu_backward",
               {gate, up, matrix("dout", dtype, rows, columns, alignment),
                close(matrix("dgate", dtype, rows, columns, alignment), kMagnitude),
                close(matrix("dup", dtype, rows, columns, alignment), kMagnitude)},
               [](const Exec& exec, const TensorList& t) {
                 swiglu_backward(exec, t[0], t[1], t[2], t[3], t[4]);
               });
}

TEST_P(Kernels, SwigluMatchesTheCpu) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      for (const DType dtype : kDTypes) {
        for (const Alignment alignment : kAlignments)
          expect_swiglu(comm, dtype, rows, columns, alignment);
      }
    });
    expect_swiglu(comm, DType::bf16, 65600, 257, {});  // more rows than a grid is high
  });
}

TEST_P(Kernels, SwigluOfColumnRangesMatchesTheCpu) {
  run([](Communicator& comm) {
    for (const DType dtype : kDTypes) {
      for (const int64_t columns : {7, 136}) {
        expect_equal(comm, "swiglu_forward of halves",
                     {ranged(matrix("gate and up", dtype, 37, 2 * columns), -6, 6),
                      close(matrix("out", dtype, 37, columns), 0.1)},
                     [&](const Exec& exec, const TensorList& t) {
                       swiglu_forward(exec, t[0].narrow(1, 0, columns),
                                      t[0].narrow(1, columns, columns), t[1]);
                     });
      }
    }
  });
}

// As many as arguments of one kernel, of the next larger one, and more than either.
TEST_P(Kernels, SumOfAnyNumberOfTermsHasTheCpusBits) {
  run([](Communicator& comm) {
    for (const int num_terms : {1, 16, 17, 256, 257}) {
      for (const int64_t elements : {1, 260, 1027}) {
        for (const DType dtype : kDTypes) {
          std::vector<Operand> operands;
          for (int t = 0; t < num_terms; ++t) {
            operands.push_back(vector("term " + std::to_string(t), dtype, elements));
          }
          operands.back() = exact(operands.back());
          expect_equal(comm, "sum into the last term", operands,
                       [](const Exec& exec, const TensorList& t) { sum(exec, t, t.back()); });
        }
      }
    }
  });
}

TEST_P(Kernels, AddAndCastHaveTheCpusBits) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      for (const DType dtype : kDTypes) {
        for (const Alignment alignment : kAlignments) {
          const Operand x = matrix("x", DType::f32, rows, columns, alignment);
          const Operand y = matrix("y", dtype, rows, columns, alignment);
          expect_equal(comm, "add",
                       {x, y, exact(matrix("out", DType::f32, rows, columns, alignment))},
                       [](const Exec& exec, const TensorList& t) { add(exec, t[0], t[1], t[2]); });
          expect_equal(comm, "add in alignment", {exact(x), y},
                       [](const Exec& exec, const TensorList& t) { add(exec, t[0], t[1], t[0]); });
          if (alignment.gap != 0) continue;
          for (const DType to : kDTypes) {
            expect_equal(comm, "cast", {y, exact(matrix("to", to, rows, columns, alignment))},
                         [](const Exec& exec, const TensorList& t) { cast(exec, t[0], t[1]); });
          }
        }
      }
    });
  });
}

TEST_P(Kernels, CosineTransformsMatchTheCpu) {
  run([](Communicator& comm) {
    for (const auto& [rows, columns] :
         {std::pair{1, 1}, {1, 200}, {67, 71}, {48, 96}, {192, 128}}) {
      const DctTiles tiles = DctTiles::of(rows, columns, kMaxDctTile);
      for (const int64_t start : {0, 1}) {
        const Alignment alignment{.start = start};
        const Operand x = matrix("x", DType::f32, rows, columns, alignment);
        const Operand y = matrix("y", DType::f32, rows, columns, alignment);
        expect_equal(comm, "dct_forward", {x, close(y, 8)},
                     [&](const Exec& exec, const TensorList& t) {
                       dct_forward(exec, tiles, 0.5f, t[0], t[1]);
                     });
        expect_equal(
            comm, "dct_inverse", {y, close(x, 8)},
            [&](const Exec& exec, const TensorList& t) { dct_inverse(exec, tiles, t[0], t[1]); });
        expect_equal(comm, "to_tiles", {x, exact(y)}, [&](const Exec& exec, const TensorList& t) {
          to_tiles(exec, tiles, t[0], t[1]);
        });
        expect_equal(comm, "from_tiles", {y, exact(x)}, [&](const Exec& exec, const TensorList& t) {
          from_tiles(exec, tiles, t[0], t[1]);
        });
      }
    }
  });
}

TEST_P(Kernels, EmbeddingHasTheCpusBits) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      // Rows of this rank and of others; with many tokens, several scans and repeated tokens.
      const Operand tokens = vector("tokens", DType::i32, rows, 0, 2 * kBegin + kTableRows);
      for (const DType dtype : kDTypes) {
        for (const Alignment alignment : kAlignments) {
          expect_equal(comm, "embedding_backward",
                       {tokens, matrix("dout", dtype, rows, columns, alignment),
                        exact(matrix("dtable", DType::f32, kTableRows, columns, alignment)),
                        scratch(matrix("order", DType::i32, 2, rows))},
                       [](const Exec& exec, const TensorList& t) {
                         embedding_backward(exec, t[0], t[1], kBegin, t[2], t[3]);
                       });
          if (alignment.gap != 0) continue;
          expect_equal(comm, "embedding_forward",
                       {tokens, matrix("table", dtype, kTableRows, columns, alignment),
                        exact(matrix("out", dtype, rows, columns, alignment))},
                       [](const Exec& exec, const TensorList& t) {
                         embedding_forward(exec, t[0], t[1], kBegin, t[2]);
                       });
        }
      }
    });
    const auto check_tokens = [&](const std::string& what, int64_t rows, int64_t table_rows,
                                  double low, double high) {
      for (const DType dtype : kDTypes) {
        expect_equal(
            comm, "embedding_backward of " + what,
            {vector("tokens", DType::i32, rows, low, high), matrix("dout", DType::bf16, rows, 40),
             exact(matrix("dtable", dtype, table_rows, 40)),
             scratch(matrix("order", DType::i32, 2, rows))},
            [](const Exec& exec, const TensorList& t) {
              embedding_backward(exec, t[0], t[1], kBegin, t[2], t[3]);
            });
      }
    };
    check_tokens("one token", 3000, kTableRows, kBegin, kBegin);
    check_tokens("tokens of other ranks", 100, kTableRows, kBegin + kTableRows, 2000);
    for (const int64_t rows : {63, 64, 65, 128, 129}) {  // around the length of long runs
      check_tokens("short and long runs", rows, 2, kBegin, kBegin + 2);
    }
    check_tokens("long runs", 5000, kTableRows, 0, 30);
    for (const int64_t table_rows : {512, 513, 1025, 3000}) {  // sorted by 1, 2, 4 and 8 blocks
      check_tokens("few of each token", 3000, table_rows, 0, double(table_rows + 2 * kBegin));
    }
  });
}

TEST_P(Kernels, CrossEntropyMatchesTheCpu) {
  run([](Communicator& comm) {
    for_each_size([&](int64_t rows, int64_t columns) {
      for (const Alignment alignment : kAlignments) {
        const Operand logits =
            ranged(matrix("logits", DType::f32, rows, columns, alignment), -4, 4);
        // None, of this rank's columns, and of others on both sides.
        const Operand targets =
            vector("targets", DType::i32, rows, -1, double(2 * kBegin + columns));
        const Operand maxima = vector("maxima", DType::f32, rows, 3, 5);
        expect_equal(
            comm, "cross_entropy_max", {logits, exact(vector("maxima", DType::f32, rows))},
            [](const Exec& exec, const TensorList& t) { cross_entropy_max(exec, t[0], t[1]); });
        expect_equal(
            comm, "cross_entropy_sum",
            {logits, targets, maxima, close(vector("sums", DType::f32, rows), double(columns)),
             exact(vector("picked", DType::f32, rows))},
            [](const Exec& exec, const TensorList& t) {
              cross_entropy_sum(exec, t[0], t[1], kBegin, t[2], t[3], t[4]);
            });
        for (const DType dtype : kDTypes) {
          expect_equal(comm, "cross_entropy_backward",
                       {logits, targets, maxima, vector("sums", DType::f32, rows, 1, 9),
                        close(matrix("dlogits", dtype, rows, columns, alignment), double(kScale))},
                       [](const Exec& exec, const TensorList& t) {
                         cross_entropy_backward(exec, t[0], t[1], kBegin, t[2], t[3], kScale, t[4]);
                       });
        }
      }
    });
  });
}

TEST_P(Kernels, CrossEntropyMaxAndSumHaveTheBitsOfTheTwoSteps) {
  run([](Communicator& comm) {
    const auto check = [&](int64_t rows, int64_t columns) {
      for (const Alignment alignment : kAlignments) {
        const Operand sums = vector("sums", DType::f32, rows),
                      maxima = vector("max", DType::f32, rows);
        expect_equal(comm, "cross_entropy_max_and_sum",
                     {ranged(matrix("logits", DType::f32, rows, columns, alignment), -4, 4),
                      vector("targets", DType::i32, rows, -1, double(columns)), exact(maxima),
                      close(sums, double(columns)), exact(vector("picked", DType::f32, rows)),
                      scratch(maxima), scratch(sums), scratch(vector("picked", DType::f32, rows))},
                     [&](const Exec& exec, const TensorList& t) {
                       cross_entropy_max_and_sum(exec, t[0], t[1], t[2], t[3], t[4]);
                       cross_entropy_max(exec, t[0], t[5]);
                       cross_entropy_sum(exec, t[0], t[1], 0, t[5], t[6], t[7]);
                       for (const size_t i : {2, 3, 4}) {
                         std::vector<float> at_once(size_t(rows) + 1), in_steps(size_t(rows) + 1);
                         copy(exec, t[i], Tensor::of(at_once.data(), {rows}));
                         copy(exec, t[i + 3], Tensor::of(in_steps.data(), {rows}));
                         EXPECT_EQ(at_once, in_steps) << rows << " x " << columns << ": " << i;
                       }
                     });
      }
    };
    for_each_size(check);
    check(2, 32768);  // as many columns as a block's registers hold
    check(2, 32772);
    check(2, 8192);
    check(2, 8193);
  });
}

TEST_P(Kernels, CrossEntropyLossMatchesTheCpu) {
  run([](Communicator& comm) {
    for (const int64_t rows : {0, 1, 7, 129, 1000, 4096}) {
      std::vector<double> losses;  // of the CPU, then of the GPU's calls
      expect_equal(
          comm, "cross_entropy_loss",
          {vector("targets", DType::i32, rows, -1, 3), vector("sums", DType::f32, rows, 1, 9),
           vector("picked", DType::f32, rows), scratch(vector("total", DType::u8, sizeof(double)))},
          [&](const Exec& exec, const TensorList& t) {
            clear(exec, t[3]);
            // Two microbatches.
            const int64_t first = rows / 3;
            for (const auto& [begin, count] :
                 {std::pair(int64_t(0), first), {first, rows - first}}) {
              cross_entropy_loss(exec, t[0].narrow(0, begin, count), t[1].narrow(0, begin, count),
                                 t[2].narrow(0, begin, count), t[3]);
            }
            double loss = 0;
            copy(exec, t[3], Tensor(&loss, DType::u8, {sizeof(loss)}));
            losses.push_back(loss);
          });
      ASSERT_EQ(losses.size(), 3u);
      EXPECT_NEAR(losses[1], losses[0], 1e-11 * std::abs(losses[0])) << rows << " rows";
      EXPECT_EQ(losses[2], losses[1]) << rows << " rows";
    }
  });
}

TEST_P(Kernels, OtherDTypesAreRefusedByName) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const Memory memory(4096, exec.device);
    const auto tensor = [&](DType dtype) { return memory.view(dtype, {2, 8}); };
    const auto row = [&](DType dtype) { return memory.view(dtype, {8}); };
    const Tensor floats = tensor(DType::f32), halves = tensor(DType::f16);
    const auto refuses = [](const std::string& start, const std::function<void()>& call) {
      try {
        call();
        ADD_FAILURE() << start << ": no error";
      } catch (const InvalidArgument& error) {
        EXPECT_TRUE(std::string(error.what()).starts_with(start)) << error.what();
      }
    };
    refuses("rms_norm_forward: out f16[2, 8]",
            [&] { rms_norm_forward(exec, floats, row(DType::f32), 1, halves, row(DType::f32)); });
    refuses("add_rms_norm_forward: branch f32[2, 8]", [&] {
      add_rms_norm_forward(exec, floats, floats, row(DType::f32), 1, floats, tensor(DType::bf16),
                           row(DType::f32));
    });
    refuses("rms_norm: x bf16[2, 8]",
            [&] { rms_norm(exec, tensor(DType::bf16), row(DType::f32), 1, floats); });
    refuses("rms_norm_backward: dx f16[2, 8]", [&] {
      rms_norm_backward(exec, floats, row(DType::f32), row(DType::f32), floats, halves,
                        row(DType::f32));
    });
    refuses("rms_norm_backward: partial_sums f32[1, 8]", [&] {
      rms_norm_backward(exec, floats, row(DType::f32), row(DType::f32), floats, floats,
                        row(DType::f32), floats.rows(0, 1));
    });
    refuses("swiglu_forward: up f32[2, 8]",
            [&] { swiglu_forward(exec, tensor(DType::bf16), floats, tensor(DType::bf16)); });
    refuses("swiglu_backward: dout f16[2, 8]",
            [&] { swiglu_backward(exec, floats, floats, halves, floats, floats); });
    refuses("add: y f16[2, 8]", [&] { add(exec, floats, halves, floats); });
    refuses("cast: to f16[2, 8]", [&] { cast(exec, floats, halves); });
    refuses("embedding_forward: tokens f32[8]",
            [&] { embedding_forward(exec, row(DType::f32), floats, 0, floats); });
    refuses("embedding_backward: dtable f16[2, 8]",
            [&] { embedding_backward(exec, row(DType::i32), floats, 0, halves); });
    refuses("cross_entropy_max: logits f16[2, 8]",
            [&] { cross_entropy_max(exec, halves, row(DType::f32)); });
    const auto loss_of = [&](DType sums, const Tensor& total) {
      cross_entropy_loss(exec, row(DType::i32), row(sums), row(DType::f32), total);
    };
    refuses("cross_entropy_loss: sums f16[8]", [&] { loss_of(DType::f16, row(DType::u8)); });
    refuses("cross_entropy_loss: total f32[8]", [&] { loss_of(DType::f32, row(DType::f32)); });
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, Kernels, testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test
