// What a shared library exports: all that a public header declares between TANDEM_API_BEGIN and
// TANDEM_API_END. The library is compiled with hidden visibility, so that the rest stays inside.
#pragma once

#define TANDEM_API_BEGIN _Pragma("GCC visibility push(default)")
#define TANDEM_API_END _Pragma("GCC visibility pop")
