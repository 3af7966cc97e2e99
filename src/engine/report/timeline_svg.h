// A picture of a trace for a document: SVG without scripts or fonts of its own.
//
// A row per rank, or per multiprocessor for those that GPUs recorded, one time axis for all. In a
// row, a product hides other computation, and either hides a wait: what shows as waiting is
// exposed. Transfers run in strips below.
#pragma once

#include <span>
#include <string>

#include "observe/trace.h"

namespace tandem {

struct PictureOptions {
  std::string title;
  int processors = 16;  ///< shown of each rank, evenly spread; the picture says of how many
};

std::string timeline_svg(std::span<const RankEvents> ranks, const PictureOptions& options);

}  // namespace tandem
