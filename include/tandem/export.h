// Symbol visibility: a shared library exports everything that a public header declares between
// TANDEM_API_BEGIN and TANDEM_API_END; the rest is compiled with hidden visibility.
#pragma once

#define TANDEM_API_BEGIN _Pragma("GCC visibility push(default)")
#define TANDEM_API_END _Pragma("GCC visibility pop")
