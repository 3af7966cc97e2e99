// Bytes that a rank sends in a pass of context-parallel attention, without signals: formulas in the
// numbers of rows, w bytes an element. The communicator counts the same (tests).
//
//   gather, ring   k and v to each rank whose queries read them; backward: also dk and dv, in f32,
//                  to each rank whose keys are read
//   queries        q to each rank whose keys are read, and for its queries' rank a partial result
//                  with log-sums in f32; backward: q, dout, log-sums and deltas, and dq in f32
//   heads          the rows of the other ranks' heads, and results with log-sums back; backward: q,
//                  dout, log-sums, deltas, k and v, and dq, dk and dv back
#pragma once

#include <cstdint>
#include <string_view>

#include "overlap/attention/shape.h"

namespace tandem {

enum class ContextPass : uint8_t { forward, backward };

/// Bytes sent by grid.rank in `form`, one of context_forms.
int64_t context_bytes(std::string_view form, ContextPass pass, const ContextGrid& grid,
                      int64_t window);

}  // namespace tandem
