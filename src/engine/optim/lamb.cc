#include "engine/optim/lamb.h"

#include <cmath>

namespace tandem {

double trust_ratio(double weight_squares, double direction_squares) {
  if (weight_squares == 0 || direction_squares == 0) return 1;
  return std::sqrt(weight_squares / direction_squares);
}

}  // namespace tandem
