# SPDX-License-Identifier: Apache-2.0
"""What one platform wants where others take the plain program."""
