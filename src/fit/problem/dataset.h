// Rows of a sparse matrix with a label each: the data of a convex problem.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tandem::fit {

using Vector = std::vector<double>;

/// Features that a file may have: vectors of as many doubles, several a client, take memory.
constexpr int32_t kMaxFeatures = 1 << 24;

/// Compressed sparse rows. Row r has the entries [offsets[r], offsets[r + 1]) of `columns`, which
/// increase within a row, and `values`.
struct Dataset {
  int64_t features = 0;
  std::vector<int64_t> offsets{0};
  std::vector<int32_t> columns;
  std::vector<double> values;
  std::vector<double> labels;  ///< one per row

  int64_t rows() const { return int64_t(labels.size()); }
};

/// Reads LIBSVM text: a label, then index:value pairs per line, indices from 1 and increasing; `#`
/// begins a comment. `features` is the largest index. Throws IoError, with file, line and token,
/// for other text, numbers that are not finite, indices above kMaxFeatures, and a file without rows
/// or without values.
Dataset read_libsvm(const std::string& path);

/// Labels of two classes: the smaller one becomes -1 and the other +1.
struct Classes {
  double negative = -1, positive = 1;
};

/// Classes of the labels of `data`. Throws InvalidArgument, which names `path`, unless there are
/// exactly two distinct labels.
Classes find_classes(const Dataset& data, const std::string& path);

/// Replaces labels by -1 and +1. Throws InvalidArgument, which names `path`, for one of no class.
void make_classes(Dataset& data, const Classes& classes, const std::string& path);

/// Share of the rows of `data`, whose labels are classes, that x puts on the right side. Features
/// beyond those of x count as 0.
double accuracy(const Dataset& data, std::span<const double> x);

/// Permutes the rows by `seed`, so that clients get random samples of them.
void shuffle_rows(Dataset& data, uint64_t seed);

}  // namespace tandem::fit
