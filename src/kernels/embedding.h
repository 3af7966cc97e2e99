// Embedding lookup in this rank's rows [begin, begin + table.dim(0)) of a table sharded over the
// vocabulary. Tokens of other ranks give zero rows, so that the sum over ranks is exact.
#pragma once

#include <cstdint>

#include "core/exec.h"

namespace tandem {

/// out[i] = table[tokens[i] - begin] or 0. tokens: i32 [rows]; table and out: f32 or bf16, the
/// same.
void embedding_forward(const Exec& exec, const Tensor& tokens, const Tensor& table, int64_t begin,
                       const Tensor& out);
/// dtable[tokens[i] - begin] += dout[i], in token order and in f32; dtable is f32, or bf16, each
/// row rounded once. order: scratch, i32 [2, embedding_order(exec, rows)].
void embedding_backward(const Exec& exec, const Tensor& tokens, const Tensor& dout, int64_t begin,
                        const Tensor& dtable, const Tensor& order = {});
int64_t embedding_order(const Exec& exec, int64_t rows);

}  // namespace tandem
